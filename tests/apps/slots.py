"""An app whose step models count down; some of their items raise, or end their process."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import Advance, BatchTask, Failed, InvalidItem, StepModel, install, register
from support.patience import patient

app = install(Celery("slots", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {
    "lease_expiry_s": float(os.environ.get("LEASE_EXPIRY_S", patient(1.5)))
}
app.conf.task_routes = {"apps.slots.upper": "upper", "apps.slots.double": "double"}

#: How long a step takes, in seconds.
STEP_S = 0.01


class Countdown(StepModel):
    """An item is a number of steps; `gate` holds it back while there is no such file.

    With `hold_at` it is held back only where so many steps are left. Then a file says so.
    """

    slots = 4
    resumes = True

    def load(self, device: str) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.most = 0

    def warm_up(self) -> Sequence[Any]:
        return [1, 2]

    def preprocess(self, items: Sequence[Any], **_: Any) -> list[Any]:
        return [
            item if isinstance(item, int) else Failed(InvalidItem("not a number")) for item in items
        ]

    def join(
        self,
        slot: int,
        prepared: int,
        pieces: Sequence[Any],
        *,
        fail: str = "",
        gate: str = "",
        notes: str = "",
        **keywords: Any,
    ) -> None:
        if fail:
            raise ValueError(fail)
        counts = [piece for piece in pieces if isinstance(piece, int)]
        self.items[slot] = {"left": min([prepared, *counts]), "gate": gate, **keywords}
        self.most = max(self.most, len(self.items))
        if notes:
            with Path(notes).open("a") as file:
                file.write(f"{min([prepared, *counts])} {len(self.items)} {os.getpid()}\n")

    def leave(self, slot: int) -> None:
        del self.items[slot]

    def step(self) -> list[Advance]:
        time.sleep(STEP_S)
        told = []
        for slot, item in list(self.items.items()):
            if item.get("kill"):
                os._exit(13)
            is_held = item["left"] <= item.get("hold_at", item["left"])
            if is_held and item["gate"] and not Path(item["gate"]).exists():
                Path(f"{item['gate']}.{slot}").touch()
                told.append(Advance(slot, piece="waits"))
                continue
            item["left"] -= 1
            if item["left"] > 0:
                told.append(Advance(slot, piece=item["left"]))
                continue
            del self.items[slot]
            told.append(Advance(slot, outcome={"pid": os.getpid(), "most": self.most}))
        return told


countdown = register(app, "countdown", Countdown)


@app.task(shared=False, base=BatchTask)
def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number


def noted(path: Path) -> list[Sequence[str]]:
    """Of each item that joined with these `notes`: itself, how many were there, and the process."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
