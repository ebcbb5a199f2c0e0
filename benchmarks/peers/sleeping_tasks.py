"""A batch function that only sleeps, as a device computes: the host has nothing to do meanwhile."""

import os
import random
import time
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from benchmarks.peers.celery_client import configure, run

BATCH_S = float(os.environ.get("PEER_BATCH_S", "0.1"))

#: Batches take times that are distributed log-normally, with this sigma; `BATCH_S` is the median.
SIGMA = float(os.environ.get("PEER_SIGMA", "0"))

times = random.Random(int(os.environ.get("PEER_SEED", "0")))

app = install(Celery("bench"))
configure(app)


@app.task(base=BatchTask, name="sleep", max_batch_size=32)
def sleep(items: list[Any]) -> list[Any]:
    """Takes as long for one item as for a full batch."""
    time.sleep(BATCH_S * times.lognormvariate(0.0, SIGMA))
    return items


if __name__ == "__main__":
    run(app, "sleep")
