"""An app whose batches have one item each; all of them wait for a gate."""

import os
from typing import Any

from celery import Celery

from apps.leases import EXPIRY_S, note
from batchery import BatchTask, install

app = install(Celery("singles", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {
    "lease_expiry_s": float(os.environ.get("LEASE_EXPIRY_S", EXPIRY_S))
}


def single(items: list[Any], *, book: str, gate: str) -> list[Any]:
    note(book, items, gate)
    return items


#: Of each of them a worker learns anew how long its batches take.
TASKS = [
    app.task(shared=False, base=BatchTask, name=f"single-{number}", max_batch_size=1)(single)
    for number in range(5)
]
