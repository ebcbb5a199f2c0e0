"""An app for real device processes: tasks and models that do as their items say."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, InvalidItem, Model, install, register

app = install(Celery("apps.device_app", broker="memory://", set_as_current=False))


@app.task(base=BatchTask, shared=False)
def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@app.task(base=BatchTask, shared=False)
async def reverse(texts: list[str]) -> list[str]:
    return [text[::-1] for text in texts]


@app.task(base=BatchTask, shared=False, bind=True)
def owners(self: BatchTask, items: list[Any]) -> list[Any]:
    if "raise" in items:
        raise LookupError("raise")
    return [[job.id, list(job.items), job.args] for job in self.request.per_item]


@app.task(base=BatchTask, shared=False)
def nap(items: list[tuple[str, float]]) -> list[None]:
    """Sleeps; says by a file, if one is named, that it has begun."""
    for begun, seconds in items:
        if begun:
            Path(begun).touch()
        time.sleep(seconds)
    return [None for _ in items]


class Lengths(Model):
    """Answers the length of each text and how many shared its forward pass."""

    def load(self, device: str) -> None:
        self.device = device

    def warm_up(self) -> Sequence[str]:
        return ["warm"]

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
        return [item or Failed(InvalidItem("text: is empty")) for item in items]

    def tokens(self, prepared: Any) -> int:
        return len(prepared)

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
        return [[len(text), len(batch)] for text in batch]


class Narrow(Lengths):
    """Has no memory for more than 100 tokens at a time, padding counted."""

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
        if max(map(len, batch)) * len(batch) > 100:
            raise MemoryError("narrow")
        return super().forward(batch)


class Broken(Model):
    def load(self, device: str) -> None:
        raise OSError("no such weights")


class Cold(Lengths):
    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
        raise ArithmeticError("not even warm-up works")


lengths = register(app, "lengths", Lengths)
narrow = register(app, "narrow", Narrow)
broken = register(app, "broken", Broken)
cold = register(app, "cold", Cold)
