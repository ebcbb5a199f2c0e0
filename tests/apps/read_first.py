"""An app whose items are read before they are in any batch, some of them not before they may."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from celery import Celery

from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("read_first", set_as_current=False))
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


class GatedReaders:
    """Puts a mark on each item; one that is a path not before the file is there."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(32)
        self._is_open = True

    @classmethod
    def open(cls, *_: Any) -> Self:
        return cls()

    def submit(self, task: str, item: Any) -> "Future[Any]":
        return self._threads.submit(self._read, item)

    def close(self) -> None:
        self._is_open = False
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, item: str) -> str:
        while item.startswith("/") and not Path(item).exists() and self._is_open:
            time.sleep(0.01)
        return f"read {Path(item).name}"


@app.task(
    shared=False,
    base=BatchTask,
    max_batch_size=8,
    Readers="apps.read_first:GatedReaders",
)
def repeat(texts: list[str]) -> list[str]:
    """Gives back what was read of its items; one of them ends the process."""
    if "read die" in texts:
        os._exit(13)
    return texts
