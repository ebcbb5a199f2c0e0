"""Answers that come in pieces."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from batchery_producer.gateway import event_stream
from batchery_producer.gateway.event_stream import SSE_TYPE, EventStream


def sent(stream: EventStream) -> list[bytes]:
    """The bodies that a stream sends."""
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))

    asyncio.run(stream.stream_response(send))
    return [body for body in bodies if body]


@pytest.mark.parametrize(
    ("media_type", "ping"), [(SSE_TYPE, b": ping\n"), ("application/x-ndjson", b"\n")]
)
def test_silent_stream_says_that_it_is_alive(
    media_type: str, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.01)
    stopped: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(0.05)
        yield b"last"

    bodies = sent(EventStream(events(), lambda: stopped.append(True), media_type))
    assert (bodies[0], bodies[-1]) == (b"first", b"last")
    assert set(bodies[1:-1]) == {ping}
    assert stopped == [True]
