"""Exceptions on their way from a device: their class, their arguments, their plain attributes.

The main process looks for the class among the modules that it has loaded and imports nothing: an
error of torch must not bring torch in.
"""

import marshal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery.utils.serialization import create_exception_cls
from kombu.utils import json

from batchery_worker.ipc.values import is_plain

#: Maximum size of an attribute, as marshal writes it; larger ones stay behind.
MAX_ATTRIBUTE_BYTES = 2**16

#: As the result backend stores it, in JSON; module and name of its class and of those above it, up
#: to `Exception`; and its attributes.
SpelledException = tuple[str, Sequence[tuple[str, str]], dict[str, Any]]


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

    Hooks, `autoretry_for` and `throws` see its class. If that is unknown here, as is one that a
    function defines, or cannot be made, they see one of its name below the nearest that can.
    """
    content, kinds, attributes = spelled
    stored = json.loads(content)
    error: Exception = backend.exception_to_python(stored)
    if type(error) is not _find(*kinds[0]):
        # Its `__init__` takes other arguments than `args`, or there is no such class here.
        made = _made(kinds, stored["exc_message"])
        error = error if made is None else made
    vars(error).update(attributes)
    return error


def _made(kinds: Sequence[tuple[str, str]], args: Sequence[Any]) -> Exception | None:
    """Makes an exception without calling `__init__`."""
    module, name = kinds[0]
    for each in kinds:
        kind = _find(*each)
        if kind is None:
            continue
        with suppress(Exception):
            if each != kinds[0]:
                kind = create_exception_cls(name, module, parent=kind)
            made: Exception = kind.__new__(kind, *args)
            made.args = tuple(args)
            return made
    return None


def _find(module: str, name: str) -> Any:
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
