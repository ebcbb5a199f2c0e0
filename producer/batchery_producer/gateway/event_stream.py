"""Answers that come in pieces, each as soon as it is there."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

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
        # No empty line follows the comment: some clients take one for the end of an event, whose
        # data are missing. Alone it is no JSON, but readers of lines skip it.
        ping = b": ping\n" if media_type == SSE_TYPE else b"\n"
        super().__init__(events, media_type=media_type, headers=HEADERS)
        self._ping: Message = {"type": "http.response.body", "body": ping, "more_body": True}
        self._stop = stop

    async def stream_response(self, send: Send) -> None:
        """Sends all events, and a ping wherever none comes for long."""
        sent_s = time.monotonic()

        async def send_now(message: Message) -> None:
            nonlocal sent_s
            sent_s = time.monotonic()
            if not message.get("more_body", True):
                pinging.cancel()  # Nothing may follow the end.
            await send(message)

        async def ping() -> None:
            while True:
                if (left_s := sent_s + PING_S - time.monotonic()) > 0:
                    await asyncio.sleep(left_s)
                else:
                    await send_now(self._ping)

        # One task for all of the stream: a task for each event costs more than the event.
        pinging = asyncio.create_task(ping())
        try:
            await super().stream_response(send_now)
        finally:
            pinging.cancel()
            self._stop()
