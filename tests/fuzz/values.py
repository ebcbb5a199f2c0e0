"""Inputs for decoders: bytes, values of JSON, and valid inputs in which something is changed."""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

#: What decoders have stumbled over elsewhere: numbers beyond all types, half a character, depth.
ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 10**400, 1e308, float("inf"), float("nan"), -0.0),
    *("", "\0", "\ud800", "\u202e", "9" * 5000, "../..", "2026-01-01T00:00:00", "__class__"),
    *([], {}, [[]], {"": {}}, ["x"] * 300),
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(ODD)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)


def find_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a value, that of itself first."""
    yield place
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_places(each, (*place, name))


def with_value(whole: Any, place: Sequence[Any], value: Any) -> Any:
    """A value with another one in a place."""
    if not place:
        return value
    made = target = deepcopy(whole)
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    return made


@st.composite
def _changed_json(draw: st.DrawFn, whole: Any) -> bytes:
    place = draw(st.sampled_from(list(find_places(whole))))
    return json.dumps(with_value(whole, place, draw(VALUES))).encode()


@st.composite
def _changed_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    start = draw(st.integers(0, len(whole)))
    end = min(start + draw(st.integers(0, 8)), len(whole))
    return whole[:start] + draw(st.binary(max_size=8)) + whole[end:]


def inputs(examples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs like these examples, and quite others."""
    found = [
        st.binary(max_size=200),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.integers(1, 3000).map(lambda depth: b"[" * depth + b"]" * depth),
        st.integers(1, 3000).map(lambda depth: b'{"a":' * depth + b"1" + b"}" * depth),
    ]
    for each in examples:
        found.append(_changed_bytes(each))
        try:
            found.append(_changed_json(json.loads(each)))
        except (ValueError, RecursionError):
            continue
    return st.one_of(found)
