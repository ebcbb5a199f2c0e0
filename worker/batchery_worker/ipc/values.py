"""Plain values: lists and dictionaries of JSON's own types; what they are, and their JSON.

Most results are of that kind, and long: a vector of 384 numbers costs 180 us in Python's own
encoder, 18 in pydantic's, which reads nothing else differently but knows more types than Celery
has a spelling for. So only what was found plain is given to it.
"""

import json
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from kombu.utils import json as celery_json
from pydantic_core import PydanticSerializationError, to_json

#: Types that are plain whatever their value.
_ATOMS = {type(None), bool, float, str}

#: Integers from here on are not plain: Python reads no number of some thousands of digits, and its
#: own encoder says so before it is stored.
MAX_PLAIN_INT = 1 << 64

#: Celery's JSON has objects with this key for dates and their like. A plain result that has it,
#: too, would be read as something else: it goes the ordinary way.
_TYPE_KEY = b'"__type__"'

#: Types that can always be pickled: for the common job, a text, nothing is tried.
ALWAYS_PORTABLE_TYPES = {str, bytes, int, float, bool, type(None)}

#: Levels of nesting that the trial adds: more than the message to the device adds.
EXTRA_LEVELS = 20


def is_plain(value: Any) -> bool:
    """Whether a value is lists and dictionaries of JSON's own types, all the way down.

    Raises:
        RecursionError: It is nested too deeply to say.
    """
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and is_plain(list(value.values()))
    if kind is int:
        return bool(-MAX_PLAIN_INT < value < MAX_PLAIN_INT)
    if kind is not list and kind is not tuple:
        return kind in _ATOMS
    # Long vectors are the common case: they are looked at without a loop in Python.
    kinds = set(map(type, value))
    if kinds == {int}:
        return bool(min(value) > -MAX_PLAIN_INT and max(value) < MAX_PLAIN_INT)
    return kinds <= _ATOMS or all(map(is_plain, value))


def plain_json(value: Any) -> bytes:
    """The JSON of a plain value, in UTF-8.

    Raises:
        ValueError: It contains itself.
        RecursionError: It is nested too deeply.
    """
    try:
        return to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        # Half a surrogate pair, or more levels than pydantic goes down.
        return json.dumps(value).encode()


class Encoded:
    """The outcome of an item, or of a packed job, whose JSON is known."""

    __slots__ = ("_value", "json")

    def __init__(self, json: bytes, *value: Any) -> None:
        """Decodes nothing.

        Args:
            json: In UTF-8.
            value: What it says, where that is known.
        """
        self.json = json
        self._value = value

    @property
    def value(self) -> Any:
        """What it says; decoded at the first look."""
        if not self._value:
            self._value = (celery_json.loads(self.json),)
        return self._value[0]


def encoded(value: Any) -> Encoded | None:
    """Encodes a value that a function returned; None where the ordinary way shall have it."""
    try:
        if not is_plain(value):
            return Encoded(celery_json.dumps(value).encode(), value)
        text = plain_json(value)
    except Exception:  # noqa: BLE001 - whatever the value's own code raises
        return None
    return None if _TYPE_KEY in text else Encoded(text, value)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """A list of what is encoded already."""
    return Encoded(b"[%b]" % b",".join(part.json for part in parts))


def check_portable(values: Iterable[Any]) -> None:
    """Tries whether values can be pickled.

    Raises:
        Exception: Whatever pickle, or the values' own code, raises where they cannot.
    """
    wrapped: Any = list(values)
    if set(map(type, wrapped)) <= ALWAYS_PORTABLE_TYPES:
        return
    for _ in range(EXTRA_LEVELS):
        wrapped = [wrapped]
    pickle.dumps(wrapped, protocol=pickle.HIGHEST_PROTOCOL)


def is_portable(values: Iterable[Any]) -> bool:
    """Whether values can be pickled."""
    try:
        check_portable(values)
    except Exception:  # noqa: BLE001 - the values' own code may raise anything
        return False
    return True
