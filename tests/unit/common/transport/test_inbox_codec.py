"""What is read quickly is what kombu reads."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import serialization as kombu_serialization
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.transport.redis import Channel as KombuChannel
from kombu.utils.json import dumps, loads

from batchery.transport.inbox import Message, read_json

JSON = "application/json"

#: Not everything is in its stubs.
serialization: Any = kombu_serialization

Values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


class Channel:
    """As much of a channel as a message needs."""

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        return KombuChannel.codecs[encoding].decode(body) if encoding else body


def make(body: bytes, content_type: str = JSON, accept: set[str] | None = None) -> Message:
    payload = {
        "body": KombuChannel.codecs["base64"].encode(body),
        "content-type": content_type,
        "content-encoding": "utf-8",
        "properties": {"delivery_tag": "1", "body_encoding": "base64"},
    }
    message = Message(payload, channel=Channel())
    message.accept = {JSON} if accept is None else accept
    return message


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


def test_a_message_is_decoded() -> None:
    assert make(b"[[1], {}, {}]").payload == [[1], {}, {}]
    assert make(dumps([datetime(2026, 1, 2)]).encode()).payload == [datetime(2026, 1, 2)]


def test_a_body_that_is_not_accepted_is_refused() -> None:
    with pytest.raises(ContentDisallowed):
        _ = make(b"[1]", accept={"application/x-yaml"}).payload


def test_a_body_that_is_no_json_is_refused_in_kombus_words() -> None:
    with pytest.raises(DecodeError, match="Expecting value"):
        _ = make(b"not json").payload
