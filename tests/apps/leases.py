"""An app whose leases expire soon, with tasks of every kind that note each execution in a file."""

import os
import time
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from support.patience import patient

#: Longer than a loaded machine holds up a thread, and short enough to wait for.
EXPIRY_S = patient(1.5)

app = install(Celery("leases", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {
    "lease_expiry_s": float(os.environ.get("LEASE_EXPIRY_S", EXPIRY_S))
}
if "MASTER" in os.environ:
    # Behind Sentinel.
    app.conf.broker_transport_options["master_name"] = os.environ["MASTER"]
    app.conf.result_backend_transport_options = {"master_name": os.environ["MASTER"]}
    # By Celery's own rule it is chance which of several Sentinels a worker has after a failover.
    app.conf.broker_failover_strategy = lambda urls: chain(urls[:1], repeat(urls[-1]))
app.conf.worker_eta_task_limit = int(os.environ.get("ETA_LIMIT", "0")) or None
if "RATE" in os.environ:
    app.conf.task_annotations = {"*": {"rate_limit": os.environ["RATE"]}}
app.conf.worker_prefetch_multiplier = int(os.environ.get("PREFETCH", "4"))


def note(book: str, items: Sequence[Any], gate: str | None) -> None:
    """Writes down that items are executed, and waits for a file that is the gate."""
    with open(book, "a") as file:
        file.write("".join(f"{item}\n" for item in items))
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def batch(items: list[Any], *, book: str, gate: str | None = None) -> list[Any]:
    note(book, items, gate)
    return items
