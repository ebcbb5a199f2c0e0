"""One row of the benchmark, in a process of its own, so that its memory is its own: `ROW COUNT`.

Prints one line of JSON. The clock runs without imports, connections and the first few jobs.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from celery import group
from celery.result import AsyncResult, ResultSet
from redis import Redis

from batchery.retry import RetryPolicy
from batchery_producer import AsyncClient, Client, Publisher
from batchery_producer.collector import Collector
from batchery_producer.template import uuids
from benchmarks.peers.celery_stock import app, noop
from benchmarks.peers.peer import URL, report

#: Jobs before the clock starts.
WARM = 200

#: Commands of one pipeline of kombu's.
BATCH = 1000


@contextmanager
def clock(seconds: list[float]) -> Iterator[None]:
    """Adds how long the block takes."""
    started_s = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started_s)


def timed(function: Callable[[int], None], count: int) -> float:
    """How long so many jobs take, after a few, in seconds."""
    function(WARM)
    seconds: list[float] = []
    with clock(seconds):
        function(count)
    return seconds[0]


# Publish only


def publish_delay(count: int) -> float:
    """Celery, one by one."""

    def work(jobs: int) -> None:
        for number in range(jobs):
            noop.delay(number)

    return timed(work, count)


def publish_batch(count: int) -> float:
    """Celery in kombu's batches, with the subscription that it makes for each job."""

    def work(jobs: int) -> None:
        with app.producer_or_acquire() as producer, producer.batch(max_size=BATCH):
            for number in range(jobs):
                noop.apply_async((number,), producer=producer)

    return timed(work, count)


def publish_batchery(count: int) -> float:
    """Ours."""
    with Publisher(app, "noop") as publisher:

        def work(jobs: int) -> None:
            publisher.send(list(zip(uuids(jobs), range(jobs), strict=True)))

        return timed(work, count)


# Collect only: all results are there


def ready(collector: Any, count: int) -> list[str]:
    """Has so many jobs done; returns their ids."""
    ids = uuids(count)
    redis: Any = Redis.from_url(URL)
    with Publisher(app, "noop", headers=dict(collector.headers)) as publisher:
        collector.expect(ids)
        publisher.send([(task_id, 0) for task_id in ids])
    results = [f"celery-task-meta-{each}" for each in ids]
    while redis.exists(*results[-1000:]) < min(count, 1000) or redis.llen("celery"):
        time.sleep(0.05)
    time.sleep(1)  # Batches may be done out of order.
    return ids


def collect_get(count: int) -> float:
    """Celery, one by one."""
    seconds: list[float] = []
    with closing(Collector(app, RetryPolicy())) as collector:
        ids = ready(collector, count)
    with clock(seconds):
        for each in ids:
            AsyncResult(each, app=app).get(timeout=60)
    return seconds[0]


def collect_join(count: int) -> float:
    """Celery, all at once."""
    seconds: list[float] = []
    with closing(Collector(app, RetryPolicy())) as collector:
        ids = ready(collector, count)
    with clock(seconds):
        ResultSet([AsyncResult(each, app=app) for each in ids], app=app).join_native(timeout=600)
    return seconds[0]


def collect_batchery(count: int) -> float:
    """Ours."""
    seconds: list[float] = []
    with closing(Collector(app, RetryPolicy())) as collector:
        ids = ready(collector, count)
        left = len(ids)
        with clock(seconds):
            while left:
                left -= sum(1 for _ in collector.collect(0.25))
    return seconds[0]


# End to end


def whole_get(count: int) -> float:
    """Celery: `delay` for each, then `get` for each."""

    def work(jobs: int) -> None:
        for result in [noop.delay(number) for number in range(jobs)]:
            result.get(timeout=600)

    return timed(work, count)


def whole_group(count: int) -> float:
    """Celery's groups."""

    def work(jobs: int) -> None:
        result: Any = group(noop.s(number) for number in range(jobs)).apply_async()
        result.join_native(timeout=600)

    return timed(work, count)


def whole_map(count: int, per_job: int | None = None, task: str = "noop") -> float:
    """Ours, in batches of 64 items."""
    with Client(app) as client:

        def work(items: int) -> None:
            for _ in client.task(task, queue="celery").map(range(items), per_job=per_job):
                pass

        return timed(work, count)


def whole_multi_item_8(count: int) -> float:
    """Ours, 8 items in each message."""
    return whole_map(count, 8)


def whole_multi_item_64(count: int) -> float:
    """Ours, 64 items in each message, so that each is a batch of its own."""
    return whole_map(count, 64)


def whole_multi_item_large(count: int) -> float:
    """Ours, 64 items in each message, and up to 16 messages in a batch."""
    return whole_map(count, 64, "noop_large")


def whole_await(count: int) -> float:
    """Ours, a thousand coroutines at a time."""
    seconds: list[float] = []

    async def work() -> None:
        async with AsyncClient(app) as client:
            call = client.task("noop")
            await asyncio.gather(*(call(number) for number in range(WARM)))
            with clock(seconds):
                for start in range(0, count, 1000):
                    some = range(start, min(start + 1000, count))
                    await asyncio.gather(*(call(number) for number in some))

    asyncio.run(work())
    return seconds[0]


def main() -> None:
    """Runs the row that is named."""
    name, count = sys.argv[1], int(sys.argv[2])
    seconds = globals()[name](count)
    report(count, seconds)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
