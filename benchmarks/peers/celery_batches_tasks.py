"""celery-batches: the task stores the result of each job itself, as its documentation shows."""

from typing import Any

from celery import Celery
from celery_batches import Batches

from benchmarks.peers.celery_client import configure, run

app = Celery("bench")
configure(app)
# Else its buffer would never be full.
app.conf.worker_prefetch_multiplier = 128


@app.task(base=Batches, flush_every=64, flush_interval=0.1, name="noop")
def noop(requests: Any) -> None:
    """Does nothing."""
    for request in requests:
        app.backend.mark_as_done(request.id, request.args[0], request=request)


if __name__ == "__main__":
    run(app, "noop")
