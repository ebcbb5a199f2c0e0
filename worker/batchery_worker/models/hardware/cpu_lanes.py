"""Forward passes side by side on a CPU: each has threads of its own, and waits for no other's.

One pass with all threads waits at the end of each operation for the slowest of them, and whatever
else the machine does makes one slow. docs/benchmarks.md has the difference.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Lanes:
    """Runs forward passes of one model on threads; on pools with threads, several threads ask."""

    def __init__(self, count: int, threads: int) -> None:
        """Prepares them.

        Args:
            count: Most passes at a time, at least 1.
            threads: Of torch, shared by the passes that run; at least 1.
        """
        self._count = count
        self._threads = threads
        self._pool = ThreadPoolExecutor(count, "batchery-lane", initializer=_settle_threads)
        self._waiting: deque[tuple[Future[Tensor], Callable[[], Tensor]]] = deque()
        self._running: list[Future[Tensor]] = []
        self._lock = threading.Lock()

    def begin(self, compute: Callable[[], Tensor]) -> "Passage":
        """Takes a pass, which begins as soon as the lanes are full or a result is asked for.

        Only then is known how many there are to share the threads: a lonely pass has them all.

        Args:
            compute: Returns what the pass makes, (B, ...), in inference mode.
        """
        future: Future[Tensor] = Future()
        with self._lock:
            self._waiting.append((future, compute))
            full = len(self._waiting) >= self._count
        if full:
            self.start()
        return Passage(self, future)

    def start(self) -> None:
        """Begins all that was taken; a lonely pass has ended when it returns."""
        lonely = None
        with self._lock:
            self._running = [each for each in self._running if not each.done()]
            self._running += [future for future, _ in self._waiting]
            if len(self._running) == len(self._waiting) == 1:
                # Here and now: whoever asks would only wait for another thread.
                lonely = self._waiting.popleft()
            while self._waiting:
                threads = max(1, self._threads // min(self._count, len(self._running)))
                self._pool.submit(_run, *self._waiting.popleft(), threads)
        if lonely is not None:
            _run(*lonely, self._threads)


class Passage:
    """A pass that was taken."""

    def __init__(self, lanes: Lanes, result: Future[Tensor]) -> None:
        self._lanes = lanes
        self._result = result

    def wait(self) -> Tensor:
        """What the pass makes, as soon as it is there; may be called again.

        Raises:
            Exception: What the pass has raised.
        """
        self._lanes.start()
        return self._result.result()


def _settle_threads() -> None:
    # With its first operation a thread takes over whatever number another one has set last.
    torch.get_num_threads()


def _run(future: Future[Tensor], compute: Callable[[], Tensor], threads: int) -> None:
    try:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            future.set_result(compute())
    except BaseException as error:  # noqa: BLE001 - for whoever waits
        future.set_exception(error)
