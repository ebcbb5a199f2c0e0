"""What is read quickly is what kombu reads."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from batchery.transport.codec import read_json

Values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@settings(max_examples=200)
@given(value=Values, ascii_only=st.booleans())
def test_json_is_read_as_kombu_reads_it(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert repr(read_json(raw)) == repr(loads(raw))


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 2, tzinfo=UTC), {"when": [datetime(2026, 1, 2)]}, "half \ud800 a pair"],
    ids=["a date", "a date within", "half a surrogate pair"],
)
def test_values_of_types_that_json_lacks_are_read(value: Any) -> None:
    assert read_json(dumps(value).encode()) == value


def test_deep_nesting_is_read_by_the_slow_decoder() -> None:
    deep = b"[" * 400 + b"]" * 400
    assert repr(read_json(deep)) == deep.decode()


@pytest.mark.parametrize("raw", [b"", b"not json", b"[1", b'"\xff"', b"\xef\xbb\xbf[]"])
def test_invalid_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(raw)
