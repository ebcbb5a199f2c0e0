"""Batchery."""

from typing import Any

from celery import Celery

from batchery import BatchTask, install
from benchmarks.peers.celery_client import configure, run

app = install(Celery("bench"))
configure(app)


@app.task(base=BatchTask, name="noop", max_batch_size=64)
def noop(items: list[Any]) -> list[Any]:
    """Does nothing."""
    return items


@app.task(base=BatchTask, name="noop_large", max_batch_size=1024)
def noop_large(items: list[Any]) -> list[Any]:
    """Does nothing, for more items at once."""
    return items


if __name__ == "__main__":
    run(app, "noop")
