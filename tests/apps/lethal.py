"""An app whose workers end, or raise, while they read some messages."""

import os
from typing import Any

from celery import Celery, signals
from celery.worker.request import Request

from batchery import BatchTask, install
from batchery_worker.request import BatchRequest
from support.patience import patient

app = install(Celery("lethal", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


class Raising(Request):
    """Raises when Celery hands the job to its pool."""

    def revoked(self) -> Any:
        if "out of memory" in self.args:
            raise MemoryError("as told")
        if "no file" in self.args:
            raise FileNotFoundError("as told")
        if "no key" in self.args:
            raise KeyError("as told")
        return super().revoked()


class RaisingBatch(Raising, BatchRequest):
    """The same for a batch task."""


@app.task(shared=False, base=BatchTask, Request=f"{__name__}:RaisingBatch")
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@signals.task_received.connect
def obey(request: Any, **_: Any) -> None:
    """Ends the worker as a crash would, or in order."""
    if "crash" in request.args:
        os._exit(7)
    if "exit" in request.args:
        raise SystemExit(8)
