"""An app whose items kill the process that runs them, or the whole worker; leases are short."""

import os
import signal
import time
from pathlib import Path

from celery import Celery

from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("killers", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def obey(texts: list[str], *, folder: str) -> list[str]:
    """Notes the batch, then does what its items say, unless they are pardoned."""
    with Path(folder, "batches").open("a") as file:
        file.write(" ".join(texts) + "\n")
    if not Path(folder, "pardon").exists():
        for text in texts:
            if text == "die":
                os._exit(13)
            if text == "kill-worker":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)  # This process dies with its worker.
    return [text.upper() for text in texts]


def batches(folder: Path) -> list[list[str]]:
    """The batches that were begun so far."""
    path = folder / "batches"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@app.task(shared=False)
def count(texts: list[str]) -> int:
    """What follows a chord."""
    return len(texts)
