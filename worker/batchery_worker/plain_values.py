"""Plain values: lists and dictionaries of JSON's own types.

Most results are plain, and long: a vector of 384 numbers costs 180 us in Python's own encoder, and
18 us in pydantic's. Pydantic's encoder also writes types that Celery's JSON cannot. So it gets only
values that were found plain.
"""

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from typing import Any

from kombu.utils import json as celery_json
from pydantic_core import PydanticSerializationError, to_json

from batchery.transport.codec import TYPE_MARK, read_json

#: Types that are plain whatever their value.
_ATOMS = {type(None), bool, float, str}

#: Integers of this size or more are not plain. Python refuses to read numbers of thousands of
#: digits, and its own encoder says so before such a result is stored.
MAX_PLAIN_INT = 1 << 64

#: What is known of a value that was not decoded yet.
UNKNOWN: Any = object()


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


#: Stands on both sides of a vector that is dumped, and nowhere in JSON.
MARK = b"\0"


class Vector:
    """Float32 numbers in a JSON text: a list, or base64, as the reader of the text wants them."""

    __slots__ = ("_base64", "_row")

    def __init__(self, row: Any = None, *, base64: bytes | None = None) -> None:
        """Takes the numbers: a row of numpy, or little-endian in base64."""
        self._row = row
        self._base64 = base64

    @property
    def row(self) -> Any:
        """The numbers as a row of numpy, (D,) float32."""
        if self._row is None:
            import numpy as np

            little = np.frombuffer(a2b_base64(self.base64), "<f4")
            self._row = little.astype(np.float32, copy=False)
        return self._row

    @property
    def base64(self) -> bytes:
        """The numbers as little-endian float32, in base64."""
        if self._base64 is None:
            self._base64 = b2a_base64(self._row.astype("<f4", copy=False), newline=False)
        return self._base64

    @property
    def json(self) -> bytes:
        """The numbers as a list, with the fewest digits that are read as the same float32."""
        # Here, as a device of functions needs neither this nor numpy.
        import orjson

        return orjson.dumps(self.row, option=orjson.OPT_SERIALIZE_NUMPY)


class Encoded:
    """The outcome of an item or of a multi-item job, already encoded as JSON.

    Attributes:
        parts: The text; vectors stand between its parts, and are written when it is.
    """

    __slots__ = ("_value", "parts")

    def __init__(self, *parts: bytes | Vector, value: Any = UNKNOWN) -> None:
        """Takes the text, and what it says, if that is known already."""
        self.parts = parts
        self._value = value

    @classmethod
    def load(cls, text: bytes) -> "Encoded":
        """Reads what `dump` has written."""
        parts = text.split(MARK)
        return cls(*[Vector(base64=part) if at % 2 else part for at, part in enumerate(parts)])

    def dump(self) -> bytes:
        """The text with vectors in base64, between marks."""
        return b"".join(
            [part if isinstance(part, bytes) else b"\0%b\0" % part.base64 for part in self.parts]
        )

    @property
    def has_vectors(self) -> bool:
        """Whether there are vectors in it."""
        return any(isinstance(part, Vector) for part in self.parts)

    @property
    def json(self) -> bytes:
        """The text with vectors as lists."""
        return b"".join([part if isinstance(part, bytes) else part.json for part in self.parts])

    @property
    def packed(self) -> bytes:
        """The text with vectors in base64, as JSON."""
        return self.dump().replace(MARK, b'"')

    @property
    def value(self) -> Any:
        """The decoded value; decoded on first use."""
        if self._value is UNKNOWN:
            self._value = read_json(self.json)
        return self._value


def encoded(value: Any) -> Encoded | None:
    """Encodes a value that a function returned; None if it must be encoded in the ordinary way."""
    try:
        if not is_plain(value):
            return Encoded(celery_json.dumps(value).encode(), value=value)
        text = plain_json(value)
    except Exception:  # noqa: BLE001 - whatever the value's own code raises
        return None
    # A plain result that has this key would be read as a date or the like.
    return None if TYPE_MARK in text else Encoded(text, value=value)


def joined(some: Sequence[Encoded]) -> Encoded:
    """Joins encoded values into an encoded list."""
    parts: list[bytes | Vector] = [b"["]
    for number, each in enumerate(some):
        parts += (b",", *each.parts) if number else each.parts
    return Encoded(*parts, b"]")
