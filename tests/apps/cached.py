"""An app whose tasks have a cache, and note in a file each item that is computed."""

import os
import time
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("cached", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}


def note(path: str, texts: list[Any]) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{text}\n" for text in texts))


def wait_for_file(path: str) -> None:
    while path and not os.path.exists(path):
        time.sleep(0.01)


@app.task(shared=False, base=BatchTask, max_batch_size=32, cache="1")
def shout(texts: list[str], *, path: str, gate: str = "", mark: str = "") -> list[str]:
    """`gate` is a file that the function waits for, once it has noted its items."""
    note(path, texts)
    wait_for_file(gate)
    return [text.upper() + mark for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=32, cache="1")
def deadly(texts: list[str], *, path: str, gate: str = "") -> list[str]:
    """`die` ends the device."""
    note(path, texts)
    wait_for_file(gate)
    if "die" in texts:
        os._exit(13)
    return [text.upper() for text in texts]
