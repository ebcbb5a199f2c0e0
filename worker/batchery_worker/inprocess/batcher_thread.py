"""The thread that runs the batches of one function, and how calls get there.

While nothing is called, the thread sleeps; nothing wakes it up.
"""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from batchery.errors import BatchArgumentError, BatcherClosed, QueueFull
from batchery.execution.bisect_failures import as_exception
from batchery_worker.inprocess.batch_loop import BatcherStats, BatchLoop
from batchery_worker.inprocess.calls import Call, Gate, limited
from batchery_worker.job import Lane

#: Put behind the last call.
END = None

#: `QueueFull.retry_after_s` before the first batch, in seconds.
UNKNOWN_WAIT_S = 1.0

#: How long a batch waits for threads that were just answered: at most such a part of the time that
#: it will run, which is what callers lose by it who need not wait. Threads that take turns in two
#: groups lose half of the throughput.
MAX_LINGER_SHARE = 0.1

#: A thread takes about so long to wake up, in seconds; for less it is not worth waiting.
MIN_LINGER_S = 50e-6

#: Those that have a thread: they are drained at exit, and of no use after a fork.
_started: "weakref.WeakSet[BatcherThread]" = weakref.WeakSet()


class BatcherThread:
    """Takes calls from all threads and event loops, and runs their batches on its own."""

    def __init__(self, loop: BatchLoop) -> None:
        self.name = loop.name
        self.options = options = loop.options
        #: What items are checked by, in their caller's thread.
        self.collator = loop.collator
        #: Whose items they are where the call does not say.
        self.usual_lane = Lane(next(iter(options.classes)))
        #: What is called before the first batch; until it has succeeded, every batch fails.
        self.load: Callable[[], object] | None = None
        #: What is called after the last batch, on the thread.
        self.unload: Callable[[], object] = lambda: None
        self._loop = loop
        #: Calls; futures of those who wait for `load` alone; then the end.
        self._incoming: SimpleQueue[Call | Future[None] | None] = SimpleQueue()
        #: Calls for which there is no space yet.
        self._outside: deque[Call] = deque()
        #: How many items have space, where that is limited.
        self._waiting = 0
        if options.max_waiting is not None:
            loop.on_taken = self._free
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: How many items the next batch waits for, and until when.
        self._expected, self._expected_s = 0, 0.0
        #: Why no call is taken any more.
        self._problem: str | None = None
        self._has_ended = False

    @property
    def stats(self) -> BatcherStats:
        """What the batches looked like so far."""
        outside = self._incoming.qsize() + sum([call.left for call in self._outside])
        return self._loop.stats(self._loop.waiting + outside)

    @property
    def _is_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def check(self, *, waits: bool = True) -> None:
        """Makes sure that a call would be answered.

        Args:
            waits: Whether the calling thread waits for the answer.

        Raises:
            BatcherClosed: It would not.
            BatchArgumentError: The batch function itself calls, or a callback of a future that
                waits, and would wait for itself.
        """
        if self._problem is not None:
            raise self._closed()
        if self._is_own_thread and (waits or self._loop.is_computing):
            raise BatchArgumentError(
                f"{self.name}: its function calls the batcher that runs it, and would wait for"
                " itself; call the bare function. A callback of a future may only submit"
            )

    def send(self, call: Call) -> None:
        """Queues a call. Where its caller waits for space alone, its entrance opens.

        Raises:
            QueueFull: There is no space, and callers are refused.
            BatcherClosed: It is closed.
        """
        if self.options.max_waiting is not None:
            call.has_space = not self._outside and self._take_space(call.left)
            if not call.has_space:
                if self.options.when_full == "refuse":
                    raise self._full()
                if isinstance(call.future, Future) and not self._is_own_thread:
                    call.entrance = Gate()
        call.sent_s = monotonic()
        self._put(call)

    def start(self) -> "Future[None]":
        """Loads now; the future is done when that is."""
        self.check()
        future: Future[None] = Future()
        self._put(future)
        return future

    def look_ahead(self) -> tuple[list[Any], Mapping[str, Any]] | None:
        """What the function may prepare while it runs: see `BatchLoop.look_ahead`."""
        if not self._take_in_waiting():
            # The end is taken in by the thread's own loop.
            self._incoming.put(END)
        return self._loop.look_ahead()

    def add_tokens(self, tokens: int, computed_tokens: int) -> None:
        """Counts tokens of a function that plans its own passes, and those with padding."""
        self._loop.add_tokens(tokens, computed_tokens)

    def close(self, *, wait: bool = True, problem: str = "it is closed") -> None:
        """Takes no more calls, and answers those that are there.

        Args:
            wait: Whether to wait until that is done.
            problem: Why, for those who call later.
        """
        with self._lock:
            thread = self._thread
            if self._problem is None:
                self._problem = problem
                if thread is not None:
                    self._incoming.put(END)
        if wait and thread is not None and not self._is_own_thread:
            thread.join()

    def forked(self) -> None:
        """Notes that this process is a copy of the one that has the thread."""
        self._problem = "it was used before this process was forked; make it after the fork"
        self._thread = None
        # The parent's threads may have held its locks.
        self._lock = threading.Lock()
        self._incoming = SimpleQueue()

    def _take_space(self, items: int) -> bool:
        """Takes space for a call; one that is larger than all of it goes in alone."""
        maximum = self.options.max_waiting or 0
        with self._lock:
            if 0 < self._waiting > maximum - items:
                return False
            self._waiting += items
            return True

    def _free(self, items: int) -> None:
        with self._lock:
            self._waiting -= items

    def _put(self, call: "Call | Future[None]") -> None:
        if self._thread is None:
            with self._lock:
                if self._problem is not None:
                    raise self._closed()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._main, name=f"batchery-{self.name}", daemon=True
                    )
                    _started.add(self)
                    self._thread.start()
        self._incoming.put(call)
        if self._has_ended:
            self._refuse_rest()

    def _main(self) -> None:
        try:
            while self._take_in():
                self._turn()
                self._let_in()
            while self._outside:
                self._refuse(self._outside.popleft())
            while self._loop.waiting:
                self._turn(draining=True)
        finally:
            self._has_ended = True
            self._loop.fail_all(self._closed())
            self._refuse_rest()
            self._loop.close()
            self.unload()

    def _turn(self, *, draining: bool = False) -> None:
        try:
            if self.load is not None and self._loop.waiting:
                self._load()
            self._loop.turn(draining=draining)
            if self._loop.answered_threads:
                self._expect_answered_threads()
        except BaseException as error:  # noqa: BLE001 - callers wait, whatever happened
            self._loop.fail_all(as_exception(error, self.name))

    def _load(self) -> None:
        if self.load is not None:
            self.load()
            self.load = None

    def _take_in(self) -> bool:
        """Takes in what was called; waits if nothing is due. Returns False at the end."""
        loop, wake_s = self._loop, self._loop.wake_s()
        if not self._take(None if wake_s is None else limited(wake_s - monotonic())):
            return False
        while loop.waiting < self._expected and (left_s := self._expected_s - monotonic()) > 0:
            if not self._take(left_s):
                return False
        self._expected = 0
        return True

    def _take(self, timeout_s: float | None) -> bool:
        """Takes in what is there, and waits for it if need be. Returns False at the end."""
        try:
            call = self._incoming.get(timeout=timeout_s)
        except Empty:
            return True
        return self._admit(call) and self._take_in_waiting()

    def _take_in_waiting(self) -> bool:
        """Takes in what was called so far. Returns False at the end."""
        try:
            while self._admit(self._incoming.get_nowait()):
                pass
        except Empty:
            return True
        return False

    def _admit(self, call: "Call | Future[None] | None") -> bool:
        if isinstance(call, Call):
            if call.has_space:
                self._loop.admit(call)
            else:
                self._outside.append(call)
                self._let_in()
        elif call is not END and call.set_running_or_notify_cancel():
            try:
                self._load()
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits
                call.set_exception(as_exception(error, self.name))
            else:
                call.set_result(None)
        return call is not END

    def _let_in(self) -> None:
        """Admits the calls for which there is space, in their order."""
        while self._outside:
            call = self._outside[0]
            if not self._take_space(call.left):
                return
            self._loop.admit(self._outside.popleft())
            if call.entrance is not None:
                call.entrance.open()

    def _full(self) -> QueueFull:
        stats = self.stats
        error = QueueFull(
            f"{self.name}: {stats.waiting} items wait, and max_waiting is"
            f" {self.options.max_waiting}; try again later"
        )
        rate = stats.mean_batch_size / stats.mean_run_ms if stats.mean_run_ms else 0.0
        error.retry_after_s = stats.waiting / rate / 1e3 if rate else UNKNOWN_WAIT_S
        return error

    def _expect_answered_threads(self) -> None:
        """Notes how many items wait as soon as the threads that were answered have called again.

        They wake up one after the other, and most call again at once. A batch that left meanwhile
        would run without them, and the next one without the others, for ever.
        """
        loop = self._loop
        expected = loop.answered_threads + loop.waiting + self._incoming.qsize()
        expected = min(expected, self.options.max_batch_size)
        limit_s = MAX_LINGER_SHARE * loop.expected_run_s(expected)
        if expected > 1 and limit_s > MIN_LINGER_S:
            self._expected, self._expected_s = expected, monotonic() + limit_s

    def _closed(self) -> BatcherClosed:
        return BatcherClosed(f"{self.name}: {self._problem or 'its thread has ended'}")

    def _refuse_rest(self) -> None:
        """Fails the calls that came behind the end."""
        try:
            while True:
                self._refuse(self._incoming.get_nowait())
        except Empty:
            pass

    def _refuse(self, call: "Call | Future[None] | None") -> None:
        if isinstance(call, Call):
            call.fail(self._closed())
            if call.entrance is not None:
                call.entrance.open()
        elif call is not END and call.set_running_or_notify_cancel():
            call.set_exception(self._closed())


def _forked() -> None:
    for thread in list(_started):
        thread.forked()


def _drain_all() -> None:
    for thread in list(_started):
        thread.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_drain_all)
