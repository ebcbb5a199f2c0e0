"""Where errors were raised, told without what the frames of their functions hold.

A traceback holds the frames of all its functions, and these hold tensors. So only where each frame
was is kept, and a traceback is made of that. Celery writes it into the result, and tools that group
errors by their frames find those of the user's code.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

#: One frame: its file, its function, its line, and the name of its module.
Frame = tuple[str, str, int, str]

#: Our packages. Their frames come first, and say nothing of an error in the user's code.
PACKAGES = ("batchery", "batchery_producer", "batchery_worker")

#: Maximum number of frames that travel; of a deep recursion, the innermost ones.
MAX_FRAMES = 60

#: Descriptors of what an instance has outside its `__dict__`.
FIELDS = (GetSetDescriptorType, MemberDescriptorType)

#: Code that raises on its first line.
_STUB: CodeType = (lambda: 1 / 0).__code__


def collect_frames(error: BaseException) -> tuple[Frame, ...]:
    """The frames of an exception, from the first one that is not ours to where it was raised."""
    frames = list(_frames(error.__traceback__))
    first = next((number for number, frame in enumerate(frames) if not _is_ours(frame)), 0)
    return tuple(frames[first:][-MAX_FRAMES:])


def error_text(error: BaseException) -> str:
    """What an exception says; if its own code raises, that it does."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - whatever that code raises
        return f"its text cannot be made: {type(problem).__name__}"


def format_error(error: BaseException) -> str:
    """An exception and its traceback as Python prints them, as far as the exception's code lets."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above: Python looks for attributes such as notes
        lines = traceback.format_tb(error.__traceback__)
        return "".join([*lines, f"{type(error).__name__}: {error_text(error)}\n"])


def with_frames(error: BaseException, frames: Sequence[Frame]) -> BaseException:
    """Gives an exception a traceback that is made of frames, if there are any; returns it."""
    trace: TracebackType | None = None
    for filename, function, line, module in reversed(frames):
        frame = _frame(filename, function, line, module)
        # An instruction below 0 is none, so nobody looks for its columns.
        trace = TracebackType(trace, frame, -1, line)
    return error.with_traceback(trace)


def release_frames(error: BaseException) -> None:
    """Gives what an exception came from tracebacks that hold nothing; its own is dropped."""
    error.with_traceback(None)
    known, inner = {id(error)}, error.__cause__ or error.__context__
    while inner is not None and id(inner) not in known:
        known.add(id(inner))
        with_frames(inner, collect_frames(inner))
        inner = inner.__cause__ or inner.__context__


def _frames(trace: TracebackType | None) -> Iterator[Frame]:
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        yield code.co_filename, code.co_name, trace.tb_lineno, module
        trace = trace.tb_next


def _is_ours(frame: Frame) -> bool:
    return frame[3].partition(".")[0] in PACKAGES


def _frame(filename: str, function: str, line: int, module: str) -> FrameType:
    code = _STUB.replace(
        co_filename=filename, co_name=function, co_qualname=function, co_firstlineno=line
    )
    stub = FunctionType(code, {"__name__": module, "__file__": filename})
    try:
        stub()
    except ZeroDivisionError as error:
        trace: Any = error.__traceback__
    frame: FrameType = trace.tb_next.tb_frame
    return frame


def copy_exception(error: E) -> E:
    """An exception for one caller alone: one object raised in all would grow all their tracebacks.

    Its `__init__` is not called, as that may take other arguments than `args`. What cannot be made
    without it, such as pydantic's, is shared, and so is what refuses attributes.
    """
    with suppress(Exception):  # Whatever the class does.
        return _copy(error)
    return error


def _copy(error: E) -> E:
    kind = type(error)
    args: tuple[Any, ...] = error.args
    if isinstance(error, BaseExceptionGroup):
        args = error.message, tuple(map(copy_exception, error.exceptions))
    made: E = kind.__new__(kind, *args)
    vars(made).update(vars(error))
    # Slots, the fields of Python's own classes such as `OSError.filename`, cause and traceback.
    for base in kind.__mro__:
        for name, attribute in vars(base).items():
            if name == "__dict__" or not isinstance(attribute, FIELDS):
                continue
            with suppress(AttributeError, TypeError):  # Never set, or only to be read.
                value = getattr(error, name)
                # `OSError` writes a None that was set otherwise than nothing.
                if getattr(made, name, None) is not value:
                    setattr(made, name, value)
    made.args = args
    # Setting the cause has set this, too.
    made.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        made.__notes__ = list(error.__notes__)
    return made
