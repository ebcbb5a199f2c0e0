"""An app for real device processes: tasks and models that do as their items say."""

from collections.abc import Sequence
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, InvalidItem, Model, install, register

app = install(Celery("apps.device_app", broker="memory://", set_as_current=False))


@app.task(base=BatchTask, shared=False)
def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


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


class Broken(Model):
    def load(self, device: str) -> None:
        raise OSError("no such weights")


class Cold(Lengths):
    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
        raise ArithmeticError("not even warm-up works")


lengths = register(app, "lengths", Lengths)
broken = register(app, "broken", Broken)
cold = register(app, "cold", Cold)
