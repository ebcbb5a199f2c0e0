"""Models that hold memory by their own account, load as slowly as a test wants, and count loads."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, Model, install, register

app = install(Celery("swapping", set_as_current=False))

#: Bytes that each model holds; the last one holds three times as many.
HELD_BYTES = 2**20
NAMES = ("one", "two", "three")
LARGE = "large"


class Swapped(Model):
    """Answers with its name and process; writes each load to a book, and waits there for a gate."""

    def __init__(self, name: str, held_bytes: int) -> None:
        self.name = name
        self._held_bytes = held_bytes

    def load(self, device: str) -> None:
        self._device = device
        book, gate, sizes = (os.environ.get(f"SWAP_{name}") for name in ("BOOK", "GATE", "SIZES"))
        if Path(f"{gate}-broken-{device}").exists():
            raise OSError("no such device")
        size = Path(sizes or "") / self.name
        self.memory_bytes = int(size.read_text()) if size.is_file() else self._held_bytes
        if book is not None:
            with Path(book).open("a") as file:
                file.write(f"{self.name} {device} {os.getpid()}\n")
        while gate is not None and Path(f"{gate}-{self.name}").exists():
            time.sleep(0.01)

    def unload(self) -> None:
        self.name = "gone"

    def preprocess(self, items: Sequence[Any], *_: Any, **__: Any) -> Sequence[Any]:
        # Only the instance that has prepared an item may compute it.
        return [(self, item) for item in items]

    def forward(self, batch: Sequence[Any], *_: Any, **__: Any) -> list[dict[str, Any]]:
        assert all(owner is self for owner, _ in batch)
        for _, item in batch:
            while isinstance(item, str) and Path(item).exists():
                time.sleep(0.01)
        return [{"model": self.name, "device": self._device, "item": item} for _, item in batch]


options: dict[str, Any] = {"max_batch_size": 4}
for each in NAMES:
    places = os.environ.get(f"SWAP_DEVICES_{each.upper()}", "")
    register(
        app,
        each,
        Swapped,
        options={"name": each, "held_bytes": HELD_BYTES},
        devices=places.split(",") if places else None,
        pinned=each in os.environ.get("SWAP_PINNED", "").split(","),
        **options,
    )

register(app, LARGE, Swapped, options={"name": LARGE, "held_bytes": 3 * HELD_BYTES}, **options)


@app.task(base=BatchTask, shared=False, max_batch_size=4)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]
