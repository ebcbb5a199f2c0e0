"""An app whose task leaves a trace of each time that an item is computed."""

import os
import time

from celery import Celery

from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("tally", set_as_current=False))
# A slow machine may hold up a worker that lives for as long as the default.
app.conf.broker_transport_options = {"lease_expiry_s": patient(5)}
app.conf.worker_hijack_root_logger = False


def wait_for_file(text: str) -> None:
    while text.startswith("/") and not os.path.exists(text):
        time.sleep(0.01)


@app.task(shared=False, base=BatchTask, max_batch_size=32)
def tally(texts: list[str], *, path: str, pause_s: float = 0.0, gate: str = "") -> list[str]:
    """Notes the items in a file; `gate`, or an item that is a path, waits for such a file."""
    wait_for_file(gate)
    with open(path, "a") as file:
        file.write("".join(f"{text}\n" for text in texts))
    for text in texts:
        wait_for_file(text)
    time.sleep(pause_s)
    return [text.upper() for text in texts]


@app.task(shared=False)
def plainly(text: str, *, path: str) -> str:
    """The same as an ordinary task, for one item."""
    with open(path, "a") as file:
        file.write(f"{text}\n")
    wait_for_file(text)
    return text.upper()
