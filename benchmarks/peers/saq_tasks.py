"""SAQ with its Redis queue."""

import asyncio
from typing import Any

from saq import Queue

from peers.peer import URL, main

#: Jobs sent at the same time while the queue is filled.
CHUNK = 200

#: Pause between two looks for a result, in seconds; the default of 0.5 would be all there is.
LOOK_S = 0.001


async def noop(context: Any, *, item: Any) -> Any:  # noqa: ARG001
    """Does nothing."""
    return item


queue = Queue.from_url(URL)
settings = {"queue": queue, "functions": [noop], "concurrency": 10}


async def send(count: int) -> None:
    """Puts jobs into the queue."""
    for start in range(0, count, CHUNK):
        some = range(start, min(start + CHUNK, count))
        await asyncio.gather(*(queue.enqueue("noop", item=each, ttl=3600) for each in some))


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    main(
        lambda count: loop.run_until_complete(send(count)),
        lambda: loop.run_until_complete(queue.apply("noop", item=0, poll_interval=LOOK_S)),
    )
