"""Forward passes side by side, each with its own threads of torch.

On a CPU, a single pass with all threads waits at the end of each operation for the slowest thread,
and whatever else the machine does makes one thread slow. docs/benchmarks.md
has the difference. On cards, the stages of a pipeline are the streams.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor


class PassStreams:
    """Runs forward passes of one model on threads. Several threads may ask for passes."""

    def __init__(self, count: int, threads: int, settle: Callable[[], None] = lambda: None) -> None:
        """Starts no thread yet.

        Args:
            count: Maximum number of passes at a time, at least 1.
            threads: Threads of torch, shared by the passes that run; at least 1.
            settle: Called once by each thread before its first pass.
        """
        self._count = count
        self._threads = threads
        settle_all = partial(_settle_threads, settle)
        self._pool = ThreadPoolExecutor(count, "batchery-stream", initializer=settle_all)
        self._waiting: deque[tuple[Future[Tensor], Callable[[], Tensor]]] = deque()
        self._running: list[Future[Tensor]] = []
        self._lock = threading.Lock()
        #: Whether a thread has set another number than `threads`, which those that begin adopt.
        self._has_set_number = False

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
        """Runs a pass on this thread, beside those of the streams: it waits for none of them."""
        future: Future[Tensor] = Future()
        self._run(future, compute, 1)
        return PendingPass(self, future)

    def start(self) -> None:
        """Starts all passes that were taken; a lone pass has ended when this returns."""
        here = []
        with self._lock:
            self._running = [each for each in self._running if not each.done()]
            self._running += [future for future, _ in self._waiting]
            if len(self._running) == len(self._waiting) == 1:
                # Run it on this thread, which would otherwise only wait for another one.
                here.append(self._waiting.popleft())
            while self._waiting:
                threads = max(1, self._threads // min(self._count, len(self._running)))
                taken = self._waiting.popleft()
                try:
                    self._pool.submit(self._run, *taken, threads)
                except RuntimeError:
                    # The program ends: executors take nothing more, but calls are still answered.
                    here.append(taken)
        for taken in here:
            self._run(*taken, self._threads)

    def settle(self) -> None:
        """Sets the number of threads back that this thread has, and those that begin from now on.

        Passes on other threads set theirs, and with it that of threads that begin.
        """
        if self._has_set_number:
            # In this order: what another thread sets meanwhile is noted after that.
            self._has_set_number = False
            torch.set_num_threads(self._threads)

    def _run(self, future: Future[Tensor], compute: Callable[[], Tensor], threads: int) -> None:
        try:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
                if threads != self._threads:
                    self._has_set_number = True
            with torch.inference_mode():
                future.set_result(compute())
        except BaseException as error:  # noqa: BLE001 - for whoever waits
            future.set_exception(error)

    def close(self) -> None:
        """Ends the threads, after the passes that run; takes no more passes."""
        self._pool.shutdown()


class PendingPass:
    """A pass that waits, runs or has run."""

    def __init__(self, streams: PassStreams, result: Future[Tensor]) -> None:
        self._streams = streams
        self._result = result

    def wait(self) -> Tensor:
        """Waits for what the pass makes; may be called again.

        Raises:
            Exception: The pass has raised it.
        """
        self._streams.start()
        try:
            return self._result.result()
        finally:
            self._streams.settle()


def _settle_threads(settle: Callable[[], None]) -> None:
    # With its first operation a thread adopts the number that another thread has set last.
    torch.get_num_threads()
    settle()
