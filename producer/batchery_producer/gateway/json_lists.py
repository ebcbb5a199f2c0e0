"""Long answers, which must not hold up the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from celery.utils.functional import chunks

from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem

T = TypeVar("T")

#: Threads for long work. What waits for Redis has others, so it never waits for these.
_THREADS = ThreadPoolExecutor(2, "batchery-long-work")


def json_list(values: Iterable[Any], *, at_a_time: int = 1) -> bytes:
    """A list as JSON; arrays of numpy are lists in it.

    Values are written a few at a time. In a thread, others have their turn between them.
    """
    parts = (
        orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for some in chunks(iter(values), at_a_time)
    )
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
