"""JSON as kombu reads it, in a third of the time.

Kombu's decoder searches each mapping for values of types that JSON lacks, such as dates. Few
messages have one. All others can be read by a decoder that knows only JSON.
"""

from collections.abc import Collection
from typing import Any

from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils.json import dumps, loads
from pydantic_core import from_json

JSON = "application/json"

#: The key by which kombu marks a value that JSON has no type for.
TYPE_MARK = b'"__type__"'


def writes_kombus_json() -> bool:
    """Whether messages in JSON are written by kombu's own encoder; an app may have another."""
    return bool(registry._encoders["json"].encoder is dumps)


def reads_kombus_json(accept: Collection[str] | None) -> bool:
    """Whether messages in JSON are accepted, and read by kombu's own decoder.

    Args:
        accept: Content types that the app accepts; None for all that kombu has enabled.
    """
    is_accepted = JSON not in registry._disabled_content_types if accept is None else JSON in accept
    return is_accepted and registry._decoders.get(JSON) is loads


def read_json(data: bytes) -> Any:
    """Reads what kombu's decoder reads.

    Raises:
        ValueError: The data is no JSON.
        RecursionError: The data is nested too deeply.
    """
    if TYPE_MARK not in data:
        try:  # `suppress` would take as long as three readings.
            # The names of fields recur, so they are cached. Ids never do.
            return from_json(data, cache_strings="keys")
        except ValueError:
            pass  # Perhaps half a surrogate pair, or very deep nesting, which Python's reads.
    return loads(data)
