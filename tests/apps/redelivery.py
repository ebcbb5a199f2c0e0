"""Tasks that reject a job until it comes again, and one that says whether it came again."""

from typing import Any

from celery import Celery
from celery.exceptions import Reject

from apps.leases import note
from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("redelivery", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


def marks(request: Any) -> list[bool]:
    """Whether a request was redelivered, by each place in which Celery's tasks look."""
    return [request.delivery_info["redelivered"], getattr(request, "redelivered", False)]


@app.task(shared=False, bind=True, base=BatchTask, max_batch_size=8)
def batch(self: Any, items: list[Any], *, book: str) -> list[Any]:
    note(book, items, None)
    return [
        marks(job) if job.delivery_info["redelivered"] else Reject(requeue=True)
        for job in self.request.per_item
    ]


@app.task(shared=False, bind=True, base=BatchTask, max_batch_size=8)
def held(self: Any, items: list[Any], *, book: str, gate: str) -> list[Any]:
    note(book, items, gate)
    return [marks(job) for job in self.request.per_item]
