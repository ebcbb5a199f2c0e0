"""How a test has a worker hold more jobs than it can begin."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery, uuid

from apps import leases
from batchery_producer.publisher import Publisher
from support.patience import patient

TIMEOUT_S = patient(60)

#: Batches after which a worker believes that they are short.
BATCHES = 8


def run_short_batches(redis_url: str, directory: Path, queue: str) -> None:
    """Runs batches of `apps.leases` that take no time, so that a worker takes some ahead.

    Args:
        redis_url: Where the worker is.
        directory: Of a book that nobody reads.
        queue: One of the worker's.
    """
    with Celery("sender", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        options = {"book": str(directory / "short")}
        task = app.signature("apps.leases.batch", kwargs=options, queue=queue)
        count = BATCHES * (leases.batch.max_batch_size or 0)
        for job in [task.clone((number,)).delay() for number in range(count)]:
            job.get(timeout=TIMEOUT_S)


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
