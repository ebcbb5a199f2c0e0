"""A batch function that waits for the test, and the threads of batchers."""

import threading
from concurrent.futures import Future
from typing import Any

from support.patience import patient

#: How long a test waits for what must happen, in seconds.
WAIT_S = patient(30)


class Gate:
    """A batch function that waits until it may go on, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.opened = threading.Event()
        self.begun = threading.Event()

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.begun.set()
        assert self.opened.wait(WAIT_S)
        return [f"{item}!" for item in items]

    def hold(self, batcher: Any) -> "Future[Any]":
        """Keeps the batcher busy."""
        held: Future[Any] = batcher.submit("held")
        assert self.begun.wait(WAIT_S)
        return held


def batcher_threads() -> list[threading.Thread]:
    """The threads of batchers that live, also those of other tests."""
    return [each for each in threading.enumerate() if each.name.startswith("batchery-")]
