"""An app for `gpu_check`: a model in which one item ends the context of its CUDA device."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from celery import Celery

from batchery import Model, install, register
from batchery_worker.memory import Memory

url = os.environ["GPU_CHECK_REDIS"]
app = install(Celery("gpu_check", broker=url, backend=url, set_as_current=False))

ROWS = 10


class Fragile(Model):
    """A table on the device. The item `bad` reads beyond its end, which CUDA asserts."""

    def load(self, device: str) -> None:
        """Makes the table."""
        self.device = torch.device(device)
        self.table = torch.zeros(ROWS, device=self.device)

    def forward(self, batch: Sequence[str], **_: Any) -> Any:
        """One number per item."""
        places = [ROWS * 1000 if text == "bad" else 0 for text in batch]
        if self.device.type != "cuda" and max(places):
            setattr(Memory, "wait", _dead)  # noqa: B010 (mypy allows no assignment)
        Memory().wait()
        return self.table[torch.tensor(places, device=self.device)].tolist()


def _dead(*_: Any) -> None:
    """Stands in for whatever a CUDA device is asked after an assertion."""
    raise RuntimeError("CUDA error: device-side assert triggered")


register(app, "fragile", Fragile)
