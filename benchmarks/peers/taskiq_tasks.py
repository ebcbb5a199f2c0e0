"""taskiq with a Redis stream, which acknowledges after the result is stored."""

import asyncio
from typing import Any

import taskiq
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks.peers.peer import URL, main

#: Pause between two looks for a result, in seconds; the default of 0.2 would be all there is.
LOOK_S = 0.001

#: The same for many results.
LOOK_FOR_MANY_S = 0.05

#: Jobs sent, and results asked for, at the same time: each takes a connection.
CHUNK = 200

results: Any = RedisAsyncResultBackend(redis_url=URL, result_ex_time=3600)
# Jobs are there before the worker is: by default it would only see those that come later.
broker = RedisStreamBroker(url=URL, consumer_id="0").with_result_backend(results)


@broker.task(task_name="noop")
async def noop(item: Any) -> Any:
    """Does nothing."""
    return item


async def send(count: int) -> list[Any]:
    """Puts jobs into the queue."""
    await broker.startup()
    jobs: list[Any] = []
    for start in range(0, count, CHUNK):
        some = range(start, min(start + CHUNK, count))
        jobs += await asyncio.gather(*(noop.kiq(each) for each in some))
    return jobs


async def collect(jobs: list[Any]) -> None:
    """Waits for all results."""
    for start in range(0, len(jobs), CHUNK):
        await taskiq.gather(*jobs[start : start + CHUNK], periodicity=LOOK_FOR_MANY_S)


async def call() -> None:
    """One job and its result."""
    task = await noop.kiq(0)
    await task.wait_result(check_interval=LOOK_S, timeout=60)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    main(
        lambda count: loop.run_until_complete(send(count)),
        lambda: loop.run_until_complete(call()),
        lambda jobs: loop.run_until_complete(collect(jobs)),
    )
