"""Models that an engine runs in a process of its own."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchery import DeviceDied, Failed, InvalidItem, Model
from batchery_worker.memory import Memory


class TwoPartsError(Exception):
    """Can be pickled, and not be read."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


#: How long an item computes that is killed before, in seconds: then a test that failed can end.
HOLD_S = 60


def _refuse(_: Memory) -> None:
    raise DeviceDied("the CUDA context of cuda:0 has ended: device-side assert")


class Obedient(Model):
    """Does what the items say; others are doubled."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def load(self, device: str) -> None:
        if self.folder == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.folder == "sleep":
            time.sleep(600)
        if self.folder:
            (Path(self.folder) / f"loaded-{os.getpid()}").touch()

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> list[Any]:
        return [Failed(InvalidItem("is bad")) if each == "bad" else each for each in items]

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> list[Any]:
        return [self.answer(each) for each in batch]

    def answer(self, item: Any) -> Any:
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "two parts":
            return Failed(TwoPartsError(7, "seven"))
        if item == "a function":
            return lambda: None
        if item == "context":
            Memory.wait = _refuse  # type: ignore[assignment, method-assign]
            raise RuntimeError("device-side assert")
        if item == "hold":
            end_s = time.monotonic() + HOLD_S
            while time.monotonic() < end_s:  # Holds the interpreter lock of its own process.
                sum(range(10_000))
            return HOLD_S
        return os.getpid() if item == "pid" else item * 2
