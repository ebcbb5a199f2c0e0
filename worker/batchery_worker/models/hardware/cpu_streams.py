"""Forward passes side by side on a CPU: each has its own threads, and waits for no others.

A single pass with all threads waits at the end of each operation for the slowest thread, and
whatever else the machine does makes one thread slow. docs/benchmarks.md has the difference.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class CpuStreams:
    """Runs forward passes of one model on threads. Several threads may ask for passes."""

    def __init__(self, count: int, threads: int) -> None:
        """Starts no thread yet.

        Args:
            count: Maximum number of passes at a time, at least 1.
            threads: Threads of torch, shared by the passes that run; at least 1.
        """
        self._count = count
        self._threads = threads
        self._pool = ThreadPoolExecutor(count, "batchery-cpu-stream", initializer=_settle_threads)
        self._waiting: deque[tuple[Future[Tensor], Callable[[], Tensor]]] = deque()
        self._running: list[Future[Tensor]] = []
        self._lock = threading.Lock()

    def submit(self, compute: Callable[[], Tensor]) -> "PendingPass":
        """Takes a pass, which starts as soon as all streams are taken or a result is asked for.

        Only then is it known how many passes share the threads: a lone pass has them all.

        Args:
            compute: Returns what the pass makes, (B, ...), in inference mode.
        """
        future: Future[Tensor] = Future()
        with self._lock:
            self._waiting.append((future, compute))
            full = len(self._waiting) >= self._count
        if full:
            self.start()
        return PendingPass(self, future)

    def run_now(self, compute: Callable[[], Tensor]) -> "PendingPass":
        """Runs a pass on this thread, beside those of the streams: it waits for none of them.

        Args:
            compute: As for `submit`.
        """
        future: Future[Tensor] = Future()
        _run(future, compute, 1)
        return PendingPass(self, future)

    def start(self) -> None:
        """Starts all passes that were taken; a lone pass has ended when this returns."""
        lone = None
        with self._lock:
            self._running = [each for each in self._running if not each.done()]
            self._running += [future for future, _ in self._waiting]
            if len(self._running) == len(self._waiting) == 1:
                # Run it on this thread, which would otherwise only wait for another one.
                lone = self._waiting.popleft()
            while self._waiting:
                threads = max(1, self._threads // min(self._count, len(self._running)))
                self._pool.submit(_run, *self._waiting.popleft(), threads)
        if lone is not None:
            _run(*lone, self._threads)

    def close(self) -> None:
        """Ends the threads, after the passes that run; takes no more passes."""
        self._pool.shutdown()


class PendingPass:
    """A pass that waits, runs or has run."""

    def __init__(self, streams: CpuStreams, result: Future[Tensor]) -> None:
        self._streams = streams
        self._result = result

    def wait(self) -> Tensor:
        """Waits for what the pass makes; may be called again.

        Raises:
            Exception: The pass has raised it.
        """
        self._streams.start()
        return self._result.result()


def _settle_threads() -> None:
    # With its first operation a thread adopts the number that another thread has set last.
    torch.get_num_threads()


def _run(future: Future[Tensor], compute: Callable[[], Tensor], threads: int) -> None:
    try:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            future.set_result(compute())
    except BaseException as error:  # noqa: BLE001 - for whoever waits
        future.set_exception(error)
