"""An app with a batch function that holds the interpreter, so that no thread beside it runs."""

import ctypes
from collections.abc import Sequence

from celery import Celery

from apps.leases import EXPIRY_S, note
from batchery import BatchTask, install

app = install(Celery("gripping", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": EXPIRY_S}


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def grip(seconds: Sequence[float], *, book: str) -> Sequence[float]:
    note(book, seconds, None)
    for each_s in seconds:
        # Unlike `CDLL`, it keeps the interpreter's lock meanwhile.
        ctypes.PyDLL(None).usleep(int(each_s * 1e6))
    return seconds
