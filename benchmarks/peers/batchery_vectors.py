"""Batchery, on one Redis or a cluster: several tasks that answer with vectors."""

import os
from typing import Any

import numpy as np
from celery import Celery

from batchery import BatchTask, install

#: Celery's broker, and where batch jobs and results are: the same, or a cluster.
BROKER = os.environ.get("PEER_URL", "redis://127.0.0.1:1/0")
JOBS = os.environ.get("PEER_JOBS_URL", BROKER)

#: Numbers of a vector.
NUMBERS = 1024

#: As many tasks as a deployment has models, say; each has a queue of its own.
TASKS = [f"vectors{number}" for number in range(8)]

VECTOR = np.random.default_rng(0).normal(size=NUMBERS).astype(np.float32).tolist()

app = Celery("bench", broker=BROKER, backend=JOBS)
install(app, redis_url=None if JOBS == BROKER else JOBS)
app.conf.update(worker_hijack_root_logger=False, broker_connection_retry_on_startup=True)


def answer(items: list[Any]) -> list[Any]:
    """The same vector for each item."""
    return [VECTOR] * len(items)


for name in TASKS:
    app.task(base=BatchTask, name=name, max_batch_size=64)(answer)
