"""Answers that come in pieces: server-sent events, or a line of JSON for each."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import orjson
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send

from batchery_producer.gateway.problems import Problem

Format = Literal["sse", "jsonl"]

SSE_TYPE = "text/event-stream"

#: Media types of lines of JSON; we answer with the first.
LINE_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")

#: Silence after which an event stream says that it is alive, in seconds: proxies close connections
#: that are silent for longer.
PING_S = 15.0

#: A proxy must neither keep events nor gather them.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def format_for(accept: str, given: Format | None) -> Format:
    """The format that a caller wants.

    Args:
        accept: The header `Accept`; the first type in it that we have is taken.
        given: What the query says, which comes first.
    """
    if given is not None:
        return given
    for part in accept.split(","):
        name = part.partition(";")[0].strip().lower()
        if name in LINE_TYPES:
            return "jsonl"
        if name == SSE_TYPE:
            break
    return "sse"


class EventStream(StreamingResponse):
    """Sends each event as soon as it is there."""

    def __init__(
        self, events: AsyncIterator[Any], format_: Format, stop: Callable[[], object]
    ) -> None:
        """Prepares.

        Args:
            events: What JSON can say.
            format_: Their format.
            stop: Called at the end, which comes early if the caller hangs up.
        """
        is_sse = format_ == "sse"
        super().__init__(
            _encoded(events, is_sse=is_sse),
            media_type=SSE_TYPE if is_sse else LINE_TYPES[0],
            headers=HEADERS,
        )
        self._stop = stop

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Returns when the caller has hung up; where the process ends, the events say so."""
        try:
            await super().listen_for_disconnect(receive)
        except Problem:
            await asyncio.Future()

    async def stream_response(self, send: Send) -> None:
        """Sends all events."""
        try:
            await super().stream_response(send)
        finally:
            self._stop()


async def _encoded(events: AsyncIterator[Any], *, is_sse: bool) -> AsyncIterator[bytes]:
    while True:
        following = asyncio.ensure_future(anext(events, None))
        while not (await asyncio.wait([following], timeout=PING_S))[0]:
            # An empty line is no JSON, but readers of lines skip it.
            yield KEEPALIVE_COMMENT if is_sse else b"\n"
        event = following.result()
        if event is None:
            return
        text = orjson.dumps(event)
        yield format_sse_event(data_str=text.decode()) if is_sse else text + b"\n"
