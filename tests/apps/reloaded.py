"""An app whose model is a file: its text is the version, and all results are that text."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import Model, ModelLoadError, install, register
from support.patience import patient

app = install(Celery("reloaded", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(3)}


class Text(Model):
    """Its folder has the file `version`; a file `gate` there holds up whoever loads it."""

    def load(self, device: str) -> None:
        folder = Path(os.environ["RELOADED"])
        self.text = (folder / "version").read_text()
        while (folder / "gate").exists():
            (folder / "loading").touch()
            time.sleep(0.01)
        if self.text == "broken":
            raise ModelLoadError("the text is broken")

    def version(self) -> str:
        return self.text

    def forward(self, batch: Sequence[Any], pause_s: float = 0.0) -> list[str]:
        time.sleep(pause_s)
        return [self.text for _ in batch]


text = register(app, "text", Text, max_batch_size=8)
