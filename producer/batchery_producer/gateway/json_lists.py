"""Long answers, which must not hold up the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import orjson

T = TypeVar("T")


def json_list(values: Iterable[Any]) -> bytes:
    """A list as JSON; arrays of numpy are lists in it.

    Values are written one by one. In a thread, others have their turn between them.
    """
    parts = (orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) for value in values)
    return b"[" + b",".join(parts) + b"]"


async def off_loop(work: Callable[[], T], *, is_long: bool) -> T:
    """Does work in a thread if it is long; short work is done before a thread begins."""
    return await asyncio.to_thread(work) if is_long else work()
