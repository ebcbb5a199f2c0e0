"""An app with ordinary tasks that need processes of their own, and batch tasks beside them."""

import os
import time

from celery import Celery

from apps.leases import note
from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("hybrid", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.worker_pool_restarts = True
app.conf.task_routes = {
    "apps.hybrid.double": {"queue": "devices"},
    "apps.hybrid.device_pid": {"queue": "devices"},
    "apps.hybrid.gated": {"queue": "devices"},
}
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


@app.task(shared=False)
def pid(pause_s: float = 0.0) -> int:
    """The process that runs an ordinary task."""
    time.sleep(pause_s)
    return os.getpid()


@app.task(shared=False)
def exhausted() -> None:
    """Celery ends the worker of a task that has no memory."""
    raise MemoryError("full")


@app.task(shared=False)
def add(number: int, other: int) -> int:
    return number + other


@app.task(shared=False, base=BatchTask)
def device_pid(items: list[int]) -> list[int]:
    """The process that runs a batch."""
    return [os.getpid()] * len(items)


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def gated(numbers: list[int], *, book: str, gate: str) -> list[int]:
    note(book, numbers, gate)
    return numbers
