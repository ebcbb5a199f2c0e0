"""Plain values: lists and dictionaries of JSON's own types; what they are, and their JSON.

Most results are of that kind, and long: a vector of 384 numbers costs 180 us in Python's own
encoder, 18 in pydantic's, which reads nothing else differently but knows more types than Celery
has a spelling for. So only what was found plain is given to it.
"""

import json
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

#: Types that are plain whatever their value.
_ATOMS = {type(None), bool, float, str}

#: Integers from here on are not plain: Python reads no number of some thousands of digits, and its
#: own encoder says so before it is stored.
HUGE = 1 << 64


def is_plain(value: Any) -> bool:
    """Whether a value is lists and dictionaries of JSON's own types, all the way down.

    Raises:
        RecursionError: It is nested too deeply to say.
    """
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and is_plain(list(value.values()))
    if kind is int:
        return bool(-HUGE < value < HUGE)
    if kind is not list and kind is not tuple:
        return kind in _ATOMS
    # Long vectors are the common case: they are looked at without a loop in Python.
    kinds = set(map(type, value))
    if kinds == {int}:
        return bool(min(value) > -HUGE and max(value) < HUGE)
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
