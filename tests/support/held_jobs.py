"""How a test has a worker hold more jobs than it can begin."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery, uuid

from apps import leases
from batchery_producer.publisher import Publisher
from support.harness import open_redis, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)

#: Batches after which a worker believes that they are short.
BATCHES = 8


def run_short_batches(redis_url: str, directory: Path, queue: str) -> None:
    """Runs full batches of `apps.leases` that take no time, so that a worker takes some ahead.

    They come in one push, as a worker believes that of batches of about their size alone.

    Args:
        redis_url: Where the worker is.
        directory: Of a book that nobody reads.
        queue: One of the worker's.
    """
    numbers = range(BATCHES * (leases.batch.max_batch_size or 0))
    jobs = send_at_once(redis_url, queue, numbers, {"book": str(directory / "short")})
    keys = [f"celery-task-meta-{job}" for job in jobs]
    with open_redis(redis_url) as redis:
        wait_for(lambda: redis.exists(*keys) == len(jobs), "all are answered", TIMEOUT_S)


def send_at_once(
    redis_url: str, queue: str, numbers: Iterable[int], options: Mapping[str, Any]
) -> list[str]:
    """Sends jobs of `apps.leases.batch` in one push, and listens to nothing; returns their ids.

    A worker takes some ahead only for a moment. Then a batch is no short one any more.
    """
    jobs = [(uuid(), number) for number in numbers]
    with (
        Celery("sender", broker=redis_url, set_as_current=False) as app,
        Publisher(app, "apps.leases.batch", keywords=options, queue=queue) as publisher,
    ):
        publisher.send(jobs)
    return [task_id for task_id, _ in jobs]
