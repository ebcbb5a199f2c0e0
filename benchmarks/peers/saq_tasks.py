"""SAQ with its Redis queue."""

import asyncio
from typing import Any

from saq import Job, Queue

from benchmarks.peers.peer import URL, main

#: Jobs sent at the same time while the queue is filled.
CHUNK = 200

#: Pause between two looks for a result, in seconds; the default of 0.5 would be all there is.
LOOK_S = 0.001

#: The same for many results.
LOOK_FOR_MANY_S = 0.05


async def noop(context: Any, *, item: Any) -> Any:  # noqa: ARG001
    """Does nothing."""
    return item


queue = Queue.from_url(URL)
settings = {"queue": queue, "functions": [noop], "concurrency": 10}


async def send(count: int) -> list[Job]:
    """Puts jobs into the queue."""
    jobs: list[Job] = []
    for start in range(0, count, CHUNK):
        some = range(start, min(start + CHUNK, count))
        jobs += await asyncio.gather(*(queue.enqueue("noop", item=each, ttl=3600) for each in some))
    return jobs


async def collect(jobs: list[Job]) -> None:
    """Waits for all results, as `Queue.map` does."""
    left = [job.key for job in jobs]
    while left:
        found = await queue.jobs(left)
        left = [job.key for job in found if job is not None and not job.completed]
        if left:
            await asyncio.sleep(LOOK_FOR_MANY_S)


async def whole(count: int) -> None:
    """Sends jobs and waits for all results."""
    items = [{"item": number} for number in range(count)]
    await queue.map("noop", items, poll_interval=LOOK_FOR_MANY_S, ttl=3600)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    main(
        lambda count: loop.run_until_complete(send(count)),
        lambda: loop.run_until_complete(queue.apply("noop", item=0, poll_interval=LOOK_S)),
        lambda jobs: loop.run_until_complete(collect(jobs)),
        lambda count: loop.run_until_complete(whole(count)),
    )
