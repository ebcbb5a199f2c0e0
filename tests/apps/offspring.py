"""An app that leaves children behind, which keep all that they have inherited."""

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from apps.leases import EXPIRY_S, note
from batchery import BatchTask, install

app = install(Celery("offspring", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": EXPIRY_S}


def leave_child(book: str) -> None:
    """Forks a process that ends by a signal or after ten minutes; writes its id down."""
    if child := os.fork():
        note(book, [child], None)
    else:
        time.sleep(600)
        os._exit(0)


if "FORK_AT_IMPORT" in os.environ:
    # In the worker's main process, and in its devices.
    leave_child(os.environ["FORK_AT_IMPORT"])


@app.task(shared=False, base=BatchTask)
def batch(books: list[str]) -> list[str]:
    for book in books:
        leave_child(book)
    return books


@app.task(shared=False)
def ordinary(book: str) -> str:
    leave_child(book)
    return book


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def hold(items: list[Any], *, begun: str, gate: str, ended: str) -> list[Any]:
    """Notes items when they begin and when they end; waits for a file that is the gate."""
    note(begun, items, gate)
    note(ended, items, None)
    return items


def pids(book: Path) -> list[int]:
    """The children that were left."""
    return [int(line) for line in book.read_text().split()] if book.exists() else []
