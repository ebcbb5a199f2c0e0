"""Celery as it is."""

from typing import Any

from celery import Celery

from benchmarks.peers.celery_client import configure, run

app = Celery("bench")
configure(app)


@app.task(name="noop")
def noop(item: Any) -> Any:
    """Does nothing."""
    return item


if __name__ == "__main__":
    run(app, "noop")
