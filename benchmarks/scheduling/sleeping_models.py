"""Models that only sleep, to load and for each pass: for the worker of `multiplexing.py`."""

import os
import time
from collections.abc import Sequence
from typing import Any

from celery import Celery

from batchery import Model, install, register

URL = os.environ.get("SLEEPING_URL", "memory://")

#: What `multiplexing.py` says: number of models, and seconds.
MODELS = int(os.environ.get("SLEEPING_MODELS", "1"))
LOAD_S = float(os.environ.get("SLEEPING_LOAD_S", "0"))
PASS_S = float(os.environ.get("SLEEPING_PASS_S", "0"))
ITEM_S = float(os.environ.get("SLEEPING_ITEM_S", "0"))

#: Maximum number of items of a batch.
BATCH_SIZE = 32

app = install(Celery("sleeping", broker=URL, backend=URL, set_as_current=False))


class SleepingModel(Model):
    """Answers with the time."""

    memory_bytes = 1

    def load(self, device: str) -> None:  # noqa: ARG002 - it sleeps anywhere
        """Takes its time."""
        time.sleep(LOAD_S)

    def forward(self, batch: Sequence[Any], *_: Any, **__: Any) -> list[float]:
        """Takes its time; returns when that was over, in Unix seconds."""
        time.sleep(PASS_S + ITEM_S * len(batch))
        return [time.time()] * len(batch)


for number in range(MODELS):
    options: dict[str, Any] = {"max_batch_size": BATCH_SIZE, "max_batch_tokens": BATCH_SIZE}
    register(app, f"model{number:02}", SleepingModel, **options)
