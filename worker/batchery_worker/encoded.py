"""A result as it is stored: encoded once, for all jobs and for the cache."""

from collections.abc import Sequence
from typing import Any

from kombu.utils import json

from batchery_worker.plain import is_plain, plain_json

#: Celery's JSON has objects with this key for dates and their like. A plain result that has it,
#: too, would be read as something else: it goes the ordinary way.
_MARK = b'"__type__"'


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
            self._value = (json.loads(self.json),)
        return self._value[0]


def encoded(value: Any) -> Encoded | None:
    """Encodes a value that a function returned; None where the ordinary way shall have it."""
    try:
        if not is_plain(value):
            return Encoded(json.dumps(value).encode(), value)
        text = plain_json(value)
    except Exception:  # noqa: BLE001 - whatever the value's own code raises
        return None
    return None if _MARK in text else Encoded(text, value)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """A list of what is encoded already."""
    return Encoded(b"[%b]" % b",".join(part.json for part in parts))
