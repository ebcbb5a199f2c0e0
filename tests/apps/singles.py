"""An app whose batches have one item each; all of them wait for a gate."""

from typing import Any

from celery import Celery

from apps.leases import note
from batchery import BatchTask, install

app = install(Celery("singles", set_as_current=False))
app.conf.worker_hijack_root_logger = False


def single(items: list[Any], *, book: str, gate: str) -> list[Any]:
    note(book, items, gate)
    return items


#: Of each of them a worker learns anew how long its batches take.
TASKS = [
    app.task(shared=False, base=BatchTask, name=f"single-{number}", max_batch_size=1)(single)
    for number in range(5)
]
