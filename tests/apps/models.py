"""An app with a model of its own, an ordinary task, and whatever models the settings name."""

from collections.abc import Sequence
from typing import Any

from celery import Celery

from batchery import Failed, InvalidItem, Model, install, register

app = install(Celery("models", set_as_current=False))


class Counter(Model):
    """Counts words; knows how often it was loaded and what its micro-batches looked like."""

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.loads = 0

    def load(self, device: str) -> None:
        self.loads += 1
        self.device = device

    def warm_up(self) -> Sequence[str]:
        return ["warm up"]

    def preprocess(self, items: Sequence[Any], **_: Any) -> list[Any]:
        return [
            item.split() if isinstance(item, str) else Failed(InvalidItem("text: not a string"))
            for item in items
        ]

    def tokens(self, prepared: list[str]) -> int:
        return len(prepared)

    def forward(self, batch: Sequence[list[str]], *, fail: str = "") -> list[dict[str, Any]]:
        if any(fail and fail in words for words in batch):
            raise ArithmeticError(fail)
        widths = [len(words) for words in batch]
        return [
            {"words": len(words) * self.step, "widths": widths, "loads": self.loads}
            for words in batch
        ]

    def postprocess(self, outputs: Any, **_: Any) -> list[Any]:
        return list(outputs)


counter = register(
    app, "count", Counter, options={"step": 10}, max_batch_size=32, max_batch_tokens=20
)


class Narrow(Counter):
    """Has no memory for more than 50 words at a time, padding counted."""

    def forward(self, batch: Sequence[list[str]], **_: Any) -> list[dict[str, Any]]:
        if max(map(len, batch)) * len(batch) > 50:
            raise MemoryError("narrow")
        return super().forward(batch)


narrow = register(app, "narrow", Narrow, max_batch_size=64, max_batch_tokens=400)


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number
