"""How a test has a worker hold more jobs than it can begin."""

from pathlib import Path

from celery import Celery

from apps import leases
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
