"""An app whose jobs stop at the stage of the device process that a test names."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, Model, install, register
from support.patience import patient

app = install(Celery("stages", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.worker_pool_restarts = True
# With an ordinary task, a worker prefetches so many jobs of each process, whatever its device does.
app.conf.worker_prefetch_multiplier = 64


@app.task(shared=False)
def plain() -> None:
    """An ordinary task."""


def hold_on(marker: str) -> None:
    """Leaves a marker and does not come back; the second time it passes, as the marker is there."""
    path = Path(marker)
    if not path.exists():
        path.write_text(str(os.getpid()))
        time.sleep(600)


class SlowToPrepare(Model):
    """Holds on while a batch is prepared, on the prepare thread."""

    def preprocess(self, items: Sequence[str], **_: Any) -> list[str]:
        hold_on(items[0])
        return list(items)

    def forward(self, batch: Sequence[str], **_: Any) -> list[str]:
        return list(batch)


prepared = register(app, "prepared", SlowToPrepare, queue="celery")


class SlowToWrite:
    """Holds on while it is written as JSON, on the commit thread."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __json__(self) -> str:
        hold_on(self.marker)
        return self.marker


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def committed(markers: list[str]) -> list[Any]:
    return [SlowToWrite(marker) for marker in markers]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def computed(markers: list[str]) -> list[str]:
    for marker in markers:
        hold_on(marker)
    return markers


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def served_by(items: list[Any], *, pause_s: float = 0.0) -> list[int]:
    """Which process answers."""
    time.sleep(pause_s)
    return [os.getpid() for _ in items]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def gated(items: list[Any], *, gate: str) -> list[int]:
    """Says that it has begun, and answers when the gate, a file, is there."""
    with open(f"{gate}.begun", "a") as begun:
        begun.write("begun\n")
    while not Path(gate).exists():
        time.sleep(0.01)
    return [os.getpid() for _ in items]


@app.task(shared=False, base=BatchTask, max_batch_size=64, time_limit=int(patient(2)))
def limited(seconds: list[float]) -> list[float]:
    for each in seconds:
        time.sleep(each)
    return seconds
