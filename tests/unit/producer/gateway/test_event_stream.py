import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from batchery_producer.gateway import event_stream
from batchery_producer.gateway.event_stream import EventStream, Format, format_for


@pytest.mark.parametrize(
    ("accept", "given", "format_"),
    [
        ("", None, "sse"),
        ("*/*", None, "sse"),
        ("text/event-stream", None, "sse"),
        ("application/x-ndjson", None, "jsonl"),
        ("application/jsonl; charset=utf-8", None, "jsonl"),
        ("application/json, application/x-ndjson;q=0.9", None, "jsonl"),
        ("text/event-stream, application/x-ndjson", None, "sse"),
        ("application/x-ndjson, text/event-stream", None, "jsonl"),
        ("text/event-stream", "jsonl", "jsonl"),
        ("application/x-ndjson", "sse", "sse"),
    ],
)
def test_format_is_that_of_the_query_or_the_first_accepted_one(
    accept: str, given: Format | None, format_: Format
) -> None:
    assert format_for(accept, given) == format_


def sent(stream: EventStream) -> list[bytes]:
    """The bodies that a stream sends."""
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))

    asyncio.run(stream.stream_response(send))
    return [body for body in bodies if body]


@pytest.mark.parametrize(
    ("format_", "first", "ping"),
    [("sse", b'data: {"a":1}\n\n', b": ping\n\n"), ("jsonl", b'{"a":1}\n', b"\n")],
)
def test_silent_stream_says_that_it_is_alive(
    format_: Format, first: bytes, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.01)
    stopped: list[bool] = []

    async def events() -> AsyncIterator[Any]:
        yield {"a": 1}
        await asyncio.sleep(0.05)
        yield {"a": 1}

    bodies = sent(EventStream(events(), format_, lambda: stopped.append(True)))
    assert bodies[0] == bodies[-1] == first
    assert set(bodies[1:-1]) == {ping}
    assert stopped == [True]
