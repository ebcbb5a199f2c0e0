"""How answers are written: long ones off the event loop, streams piece by piece."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from fastapi.sse import format_sse_event
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem

T = TypeVar("T")

#: Threads for long work. What waits for Redis has others, so it never waits for these.
_THREADS = ThreadPoolExecutor(2, "batchery-long-work")


def json_list(values: Iterable[Any]) -> bytes:
    """A list as JSON; arrays of numpy are lists in it.

    Values are written one by one. In a thread, others have their turn between them.
    """
    parts = (orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) for each in values)
    return b"[" + b",".join(parts) + b"]"


def json_of_arguments(value: Any) -> bytes:
    """What a caller wants a job to have as JSON, for limits and digests.

    Raises:
        Problem: It has what workers cannot read, such as integers of more than 64 bits.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise Problem(Kind.INVALID, f"the arguments cannot be sent: {error}") from error


async def off_loop(caller: Caller, work: Callable[[], T], *, is_long: bool) -> T:
    """Does work in a thread if it is long; short work is done before a thread begins.

    A caller has one such thread at a time, so that many requests of one do not delay the others'.
    """
    if not is_long:
        return work()
    async with caller.long_work:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def json_response(content: Any) -> Response:
    """An answer; arrays of numpy are lists in it."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json"
    )


def best_first(scores: Sequence[float]) -> list[int]:
    """Places of scores, the largest first, equal ones in their order.

    Raises:
        Problem: One of them is not a number, so they have no order.
    """
    for index, score in enumerate(scores):
        if math.isnan(score):
            raise Problem(Kind.FAILED, f"item {index}: the model's score is not a number")
    return sorted(range(len(scores)), key=lambda index: -scores[index])


# Answers that come in pieces, each as soon as it is there


#: Type of server-sent events.
SSE_TYPE = "text/event-stream"

#: What the schema says of such answers where events differ: their data is JSON, or `[DONE]`.
EVENTS_CONTENT: dict[str, Any] = {
    SSE_TYPE: {"itemSchema": {"type": "object", "properties": {"data": {"type": "string"}}}}
}

#: Silence after which an event stream says that it is alive, in seconds: proxies close connections
#: that are silent for longer.
PING_S = 15.0

#: What it says. No empty line follows the comment: some clients take one for the end of an event,
#: whose data are missing.
PING: Message = {"type": "http.response.body", "body": b": ping\n", "more_body": True}

#: A proxy must neither keep events nor gather them.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Sends each event as soon as it is there."""

    def __init__(self, events: AsyncIterator[bytes], stop: Callable[[], object]) -> None:
        """Prepares.

        Args:
            events: As they are written.
            stop: Called at the end, which comes early if the caller hangs up.
        """
        super().__init__(events, media_type=SSE_TYPE, headers=HEADERS)
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
                    await send_now(PING)

        # One task for all of the stream: a task for each event costs more than the event.
        pinging = asyncio.create_task(ping())
        try:
            await super().stream_response(send_now)
        finally:
            pinging.cancel()
            self._stop()


def write_event(content: Any, id_: str | None = None, event: str | None = None) -> bytes:
    """A server-sent event."""
    return format_sse_event(data_str=orjson.dumps(content).decode(), id=id_, event=event)
