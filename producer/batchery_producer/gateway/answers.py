"""How answers are written; long ones must not hold up the event loop."""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

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
