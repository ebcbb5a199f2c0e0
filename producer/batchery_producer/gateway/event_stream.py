"""Answers that come in pieces, each as soon as it is there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send

from batchery_producer.gateway.problems import Problem

#: Type of server-sent events.
SSE_TYPE = "text/event-stream"

#: What the schema says of such answers where events differ: their data is JSON, or `[DONE]`.
EVENTS_CONTENT: dict[str, Any] = {
    SSE_TYPE: {"itemSchema": {"type": "object", "properties": {"data": {"type": "string"}}}}
}

#: Silence after which an event stream says that it is alive, in seconds: proxies close connections
#: that are silent for longer.
PING_S = 15.0

#: A proxy must neither keep events nor gather them.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends each event as soon as it is there."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        stop: Callable[[], object],
        media_type: str = SSE_TYPE,
    ) -> None:
        """Prepares.

        Args:
            events: As they are written.
            stop: Called at the end, which comes early if the caller hangs up.
            media_type: `SSE_TYPE`, or that of lines of JSON.
        """
        # An empty line is no JSON, but readers of lines skip it.
        ping = KEEPALIVE_COMMENT if media_type == SSE_TYPE else b"\n"
        super().__init__(_with_pings(events, ping), media_type=media_type, headers=HEADERS)
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


async def _with_pings(events: AsyncIterator[bytes], ping: bytes) -> AsyncIterator[bytes]:
    while True:
        following = asyncio.ensure_future(anext(events, None))
        while not (await asyncio.wait([following], timeout=PING_S))[0]:
            yield ping
        event = following.result()
        if event is None:
            return
        yield event
