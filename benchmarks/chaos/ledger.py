"""Who received and executed what: files that each worker process appends to, far from Redis.

A line is written by one system call, so that it is there however the process ends.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Receipt:
    """A worker, or a device of it, has received a message."""

    #: Name of the worker.
    worker: str
    #: On the clock that all processes of a machine share, as all times here.
    at_s: float
    task_id: str
    #: Made when the message is published; it stays the same when the message is delivered again.
    tag: str


@dataclass(frozen=True, slots=True)
class Execution:
    """A task was given an item."""

    at_s: float
    job: int
    value: int


class Book:
    """Writes the ledger of one process; a fork of it writes another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def received(self, worker: str, task_id: str, tag: str) -> None:
        """Notes that a message has arrived."""
        self._append("received", f"{time.monotonic():.6f} {worker} {task_id} {tag}\n")

    def executed(self, items: Iterable[Mapping[str, int]]) -> None:
        """Notes that a task begins with these items."""
        now = f"{time.monotonic():.6f}"
        lines = (f"{now} {item['job']} {item['value']}\n" for item in items)
        self._append("executed", "".join(lines))

    def _append(self, kind: str, text: str) -> None:
        with open(self._folder / f"{kind}-{os.getpid()}", "ab", buffering=0) as file:
            file.write(text.encode())


def receipts(folder: Path) -> list[Receipt]:
    """All receipts in a folder, by time."""
    found = [
        Receipt(worker, float(at), task_id, tag)
        for at, worker, task_id, tag in _lines(folder, "received")
    ]
    return sorted(found, key=lambda each: each.at_s)


def executions(folder: Path) -> list[Execution]:
    """All executions in a folder, by time."""
    found = [
        Execution(float(at), int(job), int(value)) for at, job, value in _lines(folder, "executed")
    ]
    return sorted(found, key=lambda each: each.at_s)


def _lines(folder: Path, kind: str) -> Iterable[list[str]]:
    for path in folder.glob(f"{kind}-*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield line.split()
