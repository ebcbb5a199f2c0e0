"""An app whose worker can be killed after a job has sent what follows it, and before it is done."""

import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

from batchery import BatchTask, RetryAfter, install
from support.patience import patient

app = install(Celery("callbacks", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.0)}


class Gated(BatchTask):
    """Sends what follows it, then waits at a gate."""

    name = "apps.callbacks.gated"

    def run(self, items: list[Any], **_: Any) -> list[Any]:
        return items

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        wait_at(kwargs["gate"])


class Retried(Gated):
    """Asks for another try once, then waits at the gate."""

    name = "apps.callbacks.retried"

    def run(self, items: list[Any], **_: Any) -> list[Any]:
        return [RetryAfter(0) if not self.request.retries else item for item in items]

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        wait_at(kwargs["gate"])

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        write_down(kwargs["book"], "retried")


def wait_at(gate: str) -> None:
    with open(f"{gate}.passed", "a") as file:
        file.write("begun\n")
    while not Path(gate).exists():
        time.sleep(0.01)


def write_down(book: str, text: str) -> None:
    with open(book, "a") as file:
        file.write(f"{text}\n")


gated = app.register_task(Gated())
retried = app.register_task(Retried())


@app.task(shared=False, base=BatchTask)
def note(items: list[Any], *, book: str, hold: str | None = None) -> list[Any]:
    for item in items:
        write_down(book, str(item))
    return items


@signals.before_task_publish.connect(sender=note.name)
def hold_back(body: Any, **_: Any) -> None:
    """Waits at the gate `hold` before the message is sent."""
    if hold := body[1].get("hold"):
        wait_at(hold)
