"""An app whose broker never leaves the process that the worker is in."""

from celery import Celery

from batchery import BatchTask, install

app = install(Celery("memory", broker="memory://", backend="cache+memory://", set_as_current=False))


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64)
def mates(self: BatchTask, items: list[int]) -> list[list[str | None]]:
    """Says with which jobs each item shared its batch."""
    return [[job.id for job in self.request.jobs]] * len(items)
