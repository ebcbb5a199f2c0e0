"""Plain values: lists and dictionaries of JSON's own types.

Most results are plain, and long: a vector of 384 numbers costs 180 us in Python's own encoder, and
18 us in pydantic's. Pydantic's encoder also writes types that Celery's JSON cannot. So it gets only
values that were found plain.
"""

import json
from collections.abc import Sequence
from typing import Any

from kombu.utils import json as celery_json
from pydantic_core import PydanticSerializationError, to_json

#: Types that are plain whatever their value.
_ATOMS = {type(None), bool, float, str}

#: Integers of this size or more are not plain. Python refuses to read numbers of thousands of
#: digits, and its own encoder says so before such a result is stored.
MAX_PLAIN_INT = 1 << 64

#: The key by which Celery's JSON marks dates and the like. A plain result that has this key would
#: be read as something else, so it goes to the tracer.
_TYPE_KEY = b'"__type__"'


def is_plain(value: Any) -> bool:
    """Whether a value is lists and dictionaries of JSON's own types, not nested too deeply."""
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and is_plain(list(value.values()))
    if kind is int:
        return bool(-MAX_PLAIN_INT < value < MAX_PLAIN_INT)
    if kind is not list and kind is not tuple:
        return kind in _ATOMS
    # Long vectors are the common case, so they are checked without a loop in Python.
    kinds = set(map(type, value))
    if kinds == {int}:
        return bool(min(value) > -MAX_PLAIN_INT and max(value) < MAX_PLAIN_INT)
    try:
        return kinds <= _ATOMS or all(map(is_plain, value))
    except RecursionError:
        return False


def plain_json(value: Any) -> bytes:
    """The JSON of a plain value, in UTF-8.

    Raises:
        ValueError: It contains itself.
        RecursionError: It is nested too deeply.
    """
    try:
        return to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        # Half a surrogate pair, or deeper nesting than pydantic allows.
        return json.dumps(value).encode()


class Encoded:
    """The outcome of an item or of a multi-item job, already encoded as JSON."""

    __slots__ = ("_value", "json")

    def __init__(self, json: bytes, *value: Any) -> None:
        self.json = json
        self._value = value

    @property
    def value(self) -> Any:
        """The decoded value; decoded on first use."""
        if not self._value:
            self._value = (celery_json.loads(self.json),)
        return self._value[0]


def encoded(value: Any) -> Encoded | None:
    """Encodes a value that a function returned; None if it must be encoded in the ordinary way."""
    try:
        if not is_plain(value):
            return Encoded(celery_json.dumps(value).encode(), value)
        text = plain_json(value)
    except Exception:  # noqa: BLE001 - whatever the value's own code raises
        return None
    return None if _TYPE_KEY in text else Encoded(text, value)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """Joins encoded values into an encoded list."""
    return Encoded(b"[%b]" % b",".join(part.json for part in parts))
