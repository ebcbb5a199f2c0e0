"""An ordinary task, in an app that knows nothing of Batchery."""

from typing import Any

from celery import Celery

from apps.leases import note

app = Celery("stock", set_as_current=False)
app.conf.worker_hijack_root_logger = False
app.conf.worker_pool = "solo"
app.conf.broker_transport_options = {"leases": False}


@app.task(name="apps.stock.late", shared=False, acks_late=True)
def late(item: Any, book: str, gate: str | None = None) -> Any:
    note(book, [item], gate)
    return item
