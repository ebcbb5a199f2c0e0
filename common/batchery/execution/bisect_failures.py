"""Keeps one bad item from failing its batch mates: after an exception each half runs by itself."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from batchery.errors import OutOfMemory, WrongLength, counted
from batchery.outcomes import Answered, Failed, Replace, RetryAfter
from batchery.tracebacks import collect_frames, error_text, format_error, release_frames

#: Outcomes that are not values. An item with one of them needs no forward pass. Exceptions are
#: Celery's `Ignore` and `Reject`: any other one has become a `Failed`.
NON_VALUES = (Failed, RetryAfter, Replace, BaseException)


#: What errors of torch say, in small letters, where memory ran out.
OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA itself: pinned memory, kernels that are loaded at their first use
    "status_alloc_failed",  # cuBLAS, cuDNN
    "can't allocate memory",  # a CPU
    "failed to allocate memory",  # ONNX Runtime
)


def isolate(
    call: Callable[[Sequence[Any]], Any],
    items: Sequence[Any],
    *,
    name: str,
    convert: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Calls with all items; after an exception with each half, until the culprit is alone.

    Args:
        call: Returns one outcome per item; may raise.
        items: Any number of items.
        name: Name of the call in errors.
        convert: Applied to each outcome; by default it makes rows of arrays plain lists.

    Returns:
        One outcome per item, in order. If the number of outcomes was wrong, every item of that call
        has failed: nobody can tell which outcome belongs to which item.
    """
    if not items:
        return []
    try:
        answer = _outcomes(call(items), len(items), name)
        outcomes = [(convert or to_plain)(each) for each in answer]
    except WrongLength as error:
        return [Failed(error) for _ in items]
    except BaseException as error:
        # Whatever the user's code raises: sys.exit, cancelled coroutines, panics of Rust libraries.
        if isinstance(error, KeyboardInterrupt):
            raise
        if len(items) == 1:
            return [_failed(error, name)]
    else:
        return outcomes
    # Outside the handler, because by now the exception and the tensors in its frames are freed.
    middle = len(items) // 2
    return [
        *isolate(call, items[:middle], name=name, convert=convert),
        *isolate(call, items[middle:], name=name, convert=convert),
    ]


def _outcomes(answer: Any, expected: int, name: str) -> list[Any]:
    """Checks that there is one outcome per item."""
    if isinstance(answer, str | bytes | Mapping | AbstractSet) or not isinstance(answer, Iterable):
        raise WrongLength(
            f"{name} returned a {type(answer).__name__} for {counted(expected, 'item')};"
            " return a list with one outcome per item"
        )
    outcomes = list(answer)
    if len(outcomes) != expected:
        raise WrongLength(
            f"{name} returned {counted(len(outcomes), 'outcome')} for {counted(expected, 'item')};"
            " return one outcome per item, in order"
        )
    return outcomes


def as_failed(outcome: Any) -> Any:
    """Treats an exception that was returned like one that was raised."""
    if isinstance(outcome, BaseException) and not _is_celerys(outcome):
        outcome = Failed(outcome)
    if isinstance(outcome, Failed) and isinstance(outcome.error, BaseException):
        return replace(outcome, error=_safe(outcome.error, "the batch function"))
    return outcome


def to_plain(outcome: Any) -> Any:
    """Turns rows of arrays and tensors into lists, which JSON can write."""
    outcome = as_failed(outcome)
    if isinstance(outcome, NON_VALUES):
        return outcome
    to_list = getattr(outcome, "tolist", None)
    return to_list() if callable(to_list) else outcome


def _failed(error: BaseException, name: str) -> Any:
    if _is_celerys(error):
        return error
    if isinstance(error, Answered):
        return error.outcome
    if is_out_of_memory(error):
        text = (error_text(error) or type(error).__name__).splitlines()[0]
        error = OutOfMemory(
            f"{name}: no memory for this item, even alone ({text});"
            " use a shorter item, a smaller dtype or a larger device"
        )
        return Failed(error)
    trace, frames = format_error(error), collect_frames(error)
    safe = _safe(error, name)
    release_frames(safe)
    return Failed(safe, trace, frames)


def _is_celerys(error: BaseException) -> bool:
    """Whether it is Celery's `Ignore` or `Reject`; then Celery is loaded."""
    loaded = sys.modules.get("celery.exceptions")
    return loaded is not None and isinstance(error, (loaded.Ignore, loaded.Reject))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    # The name identifies torch's error, as torch is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # Only torch's allocator has an error of its own. CUDA's libraries, pinned memory and a CPU's
    # memory have only a text.
    text = error_text(error).lower() if isinstance(error, RuntimeError) else ""
    return any(each in text for each in OUT_OF_MEMORY_TEXTS)


def has_run_out(error: BaseException | None) -> bool:
    """Whether memory ran out, by an error or by one that it came from."""
    while error is not None:
        if is_out_of_memory(error) or isinstance(error, OutOfMemory):
            return True
        error = error.__cause__
    return False


def _safe(error: BaseException, name: str) -> Exception:
    if isinstance(error, MemoryError):
        return OutOfMemory(f"{name}: no memory for this item ({error_text(error)})")
    return as_exception(error, name)


def as_exception(error: BaseException, name: str) -> Exception:
    """Replaces what would end a worker, or a caller's thread, instead of the job."""
    if isinstance(error, SystemExit):
        return RuntimeError(f"{name} called sys.exit({error.code!r})")
    if not isinstance(error, Exception):
        return RuntimeError(f"{name} raised {type(error).__name__}: {error_text(error)}")
    return error
