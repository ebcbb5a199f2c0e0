"""Pairs of tasks, a batch task and an ordinary one of Celery, which do the same with an item."""

import os
from collections.abc import Sequence
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, Model, install, register

app = install(Celery("mapped", set_as_current=False))
app.conf.worker_hijack_root_logger = False


def _square(item: Any) -> Any:
    if item == "raise":
        raise LookupError("no such item")
    return item * item if item != "odd" else {"not": {"json"}}


@app.task(shared=False)
def square(item: Any) -> Any:
    return _square(item)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def square_batch(items: list[Any]) -> list[Any]:
    return [_square(item) for item in items]


@app.task(shared=False)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(shared=False, base=BatchTask, max_batch_size=8)
def places(items: list[Any]) -> list[Any]:
    """Says where each item ran, and in how large a batch."""
    answer = {"pid": os.getpid(), "size": len(items)}
    return [Failed("refused") if item == "refused" else answer for item in items]


class Doubler(Model):
    """Takes its jobs from a queue of its own."""

    def load(self, device: str) -> None:
        self.pid = os.getpid()

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> list[Any]:
        return [{"doubled": item * 2, "pid": self.pid} for item in batch]


doubler = register(app, "doubler", Doubler, queue="doubles")
