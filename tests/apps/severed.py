"""An app whose ordinary tasks meet a result backend that is away."""

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.result import AsyncResult

from batchery import BatchTask, install
from batchery.completion import JobCompletion
from batchery.retry import RetryDeadline
from batchery_worker.completion import backend

app = install(Celery("severed", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.worker_prefetch_multiplier = 1


def complete() -> JobCompletion:
    return JobCompletion(deadline=RetryDeadline(float(os.environ["WAIT_S"])))


if "WAIT_S" in os.environ:
    setattr(backend, "JobCompletion", complete)  # noqa: B010 - no test waits for half a minute


@signals.task_internal_error.connect(weak=False)
def note(**_: Any) -> None:
    Path("internal-error").touch()


@app.task(shared=False)
def early(gate: str) -> str:
    """Ends when there is a gate; it is acknowledged by then."""
    Path(f"{gate}.begun").touch()
    while not Path(gate).exists():
        time.sleep(0.01)
    return "done"


@app.task(shared=False, acks_late=True)
def late(gate: str) -> str:
    return str(early.run(gate))


@app.task(shared=False)
def read_state(book: str) -> list[Any]:
    """Reads the state of some job; notes the error, and how long it took."""
    began_s = time.monotonic()
    try:
        found = str(AsyncResult("some-job", app=app).state)
    except Exception as error:  # noqa: BLE001 - it is compared
        found = type(error).__name__
    Path(book).write_text(f"{found} {time.monotonic() - began_s}")
    return [found]


@app.task(shared=False, base=BatchTask)
def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]
