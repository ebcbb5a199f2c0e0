"""Ordinary tasks of three kinds, on Celery as it is, or with Batchery installed beside them."""

import os
import time
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from benchmarks.peers.celery_client import configure, run

#: How long a sleeping and a computing job take, in seconds.
NAP_S = 0.01
BURN_S = 0.005

app = Celery("bench")
configure(app)

if os.environ.get("PEER_INSTALL") == "1":
    install(app)

    @app.task(base=BatchTask, name="batch")
    def batch(items: list[Any]) -> list[Any]:
        """Nobody sends it; the worker has a device for it."""
        return items


@app.task(name="noop")
def noop(item: Any) -> Any:
    """Does nothing."""
    return item


@app.task(name="nap")
def nap(item: Any) -> Any:
    """Waits, as for a database."""
    time.sleep(NAP_S)
    return item


@app.task(name="burn")
def burn(item: Any) -> Any:
    """Computes, without a break for other threads."""
    end_s = time.thread_time() + BURN_S
    while time.thread_time() < end_s:
        pass
    return item


if __name__ == "__main__":
    run(app, os.environ.get("PEER_TASK", "noop"))
