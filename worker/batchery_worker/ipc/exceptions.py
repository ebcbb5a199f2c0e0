"""Exceptions between processes: plain data that makes, at the other end, what was raised."""

import marshal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from billiard.einfo import RemoteTraceback  # type: ignore[attr-defined]
from celery.utils.serialization import create_exception_cls
from kombu.utils import json

from batchery.outcomes import Failed
from batchery.tracebacks import Frame, collect_frames, with_frames
from batchery_worker.ipc.values import is_plain

#: Maximum number of exceptions of which each is the cause of the one before.
MAX_CHAINED = 5

#: Maximum size of an exception's attribute, as marshal writes it; larger ones stay behind.
MAX_ATTRIBUTE_BYTES = 2**16

#: An exception: as the result backend stores it, in JSON; module and name of its class and of those
#: above it, up to `Exception`; and its attributes.
SpelledException = tuple[str, Sequence[tuple[str, str]], dict[str, Any]]


def encode_chain(failed: Failed, backend: Any) -> list[tuple[SpelledException, list[Frame], bool]]:
    """Spells an exception and those that it came from: each with its frames.

    The last element says whether the next one is its cause, and not just its context.
    """
    error: BaseException | None = failed.exception
    frames = failed.frames or collect_frames(failed.exception)
    chain: list[tuple[SpelledException, list[Frame], bool]] = []
    while error is not None and len(chain) < MAX_CHAINED:
        cause = error.__cause__
        chain.append((encode_exception(error, backend), list(frames), cause is not None))
        context = None if error.__suppress_context__ else error.__context__
        error = context if cause is None else cause
        frames = collect_frames(error) if error is not None else ()
    return chain


def read_chain(
    spelled: Sequence[tuple[SpelledException, Sequence[Frame], bool]], trace: str, backend: Any
) -> Exception:
    """Reads what `encode_chain` wrote; `trace` is shown where no frames came along."""
    error = None
    for content, frames, has_cause in reversed(spelled):
        inner, error = error, read_exception(content, backend)
        with_frames(error, frames)
        _set(error, "__cause__" if has_cause else "__context__", inner)
    assert error is not None
    if trace and error.__traceback__ is None:
        _set(error, "__cause__", RemoteTraceback(trace))
    return error


def _set(error: BaseException, name: str, value: Any) -> None:
    """Sets an attribute of Python's own, also where the class refuses: a frozen dataclass does."""
    BaseException.__setattr__(error, name, value)


def encode_exception(error: BaseException, backend: Any) -> SpelledException:
    """Spells an exception as data that marshal writes."""
    kinds = [each for each in type(error).__mro__ if issubclass(each, BaseException)]
    return (
        json.dumps(backend.prepare_exception(error, "json")),
        [(each.__module__, each.__qualname__) for each in kinds],
        {name: value for name, value in vars(error).items() if _is_small(value)},
    )


def read_exception(spelled: SpelledException, backend: Any) -> Exception:
    """Makes the exception that `encode_exception` was given.

    It looks for the class among the modules that are loaded and imports nothing: an error of torch
    must not bring torch in. Hooks, `autoretry_for` and `throws` see the class. If that is unknown
    here, as is one that a function defines, or cannot be made, they see one of its name below the
    nearest that can.
    """
    content, kinds, attributes = spelled
    stored = json.loads(content)
    error: Exception = backend.exception_to_python(stored)
    if type(error) is not _find_exception(*kinds[0]):
        # Its `__init__` takes other arguments than `args`, or there is no such class here.
        made = _make_exception(kinds, stored["exc_message"])
        error = error if made is None else made
    vars(error).update(attributes)
    return error


def _make_exception(kinds: Sequence[tuple[str, str]], args: Sequence[Any]) -> Exception | None:
    """Makes an exception without calling `__init__`."""
    module, name = kinds[0]
    for each in kinds:
        kind = _find_exception(*each)
        if kind is None:
            continue
        with suppress(Exception):
            if each != kinds[0]:
                kind = create_exception_cls(name, module, parent=kind)
            made: Exception = kind.__new__(kind, *args)
            _set(made, "args", tuple(args))
            return made
    return None


def _find_exception(module: str, name: str) -> Any:
    """A class of exceptions; None if there is none of that name in the modules that are loaded."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _is_small(value: Any) -> bool:
    try:
        return is_plain(value) and len(marshal.dumps(value)) <= MAX_ATTRIBUTE_BYTES
    except ValueError:  # It is nested more deeply than marshal takes.
        return False
