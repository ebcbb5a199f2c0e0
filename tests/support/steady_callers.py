"""Threads that call all the time, while a test does something else."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from support.harness import wait_for
from support.patience import TIMEOUT_S


class SteadyCallers:
    """Repeats a call on some threads until the end of the block; none of them may fail."""

    def __init__(self, call: Callable[[], Iterable[Any]], threads: int = 3) -> None:
        self.answers: list[Any] = []
        self._call = call
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(threads)
        self._running = [self._pool.submit(self._run) for _ in range(threads)]

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.answers += self._call()

    def wait_more(self, count: int = 20) -> None:
        """Waits until there are so many more answers."""
        enough = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= enough, "calls go on", TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        try:
            for each in self._running:
                each.result(TIMEOUT_S)
        finally:
            self._pool.shutdown()
