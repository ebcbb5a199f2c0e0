"""An app whose model waits at a gate while it is loaded."""

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import Model, install, register

app = install(Celery("slow_start", set_as_current=False))
app.conf.worker_hijack_root_logger = False


class Slow(Model):
    """Says in a file which process loads it, and waits until another file is there."""

    def load(self, device: str) -> None:
        folder = Path(os.environ["GATE_FOLDER"])
        with open(folder / "loading", "a") as file:
            file.write(f"{os.getpid()}\n")
        while not (folder / "gate").exists():
            time.sleep(0.01)

    def forward(self, batch: Any, *_: Any, **__: Any) -> list[int]:
        return [os.getpid()] * len(batch)


register(app, "slow", Slow)

if "ORDINARY" in os.environ:

    @app.task(shared=False, name="plain")
    def plain() -> str:
        """Needs no model."""
        return "done"
