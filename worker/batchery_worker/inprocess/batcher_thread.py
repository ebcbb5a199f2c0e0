"""The thread that runs the batches of one function, and how calls get there.

While nothing is called, the thread sleeps; nothing wakes it up.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from batchery.errors import BatchArgumentError, BatcherClosed, QueueFull
from batchery.execution.bisect_failures import as_exception
from batchery_worker.inprocess.batch_loop import BatcherStats, BatchLoop
from batchery_worker.inprocess.calls import Call, LoopCall, Space, ThreadCall, limited
from batchery_worker.job import Lane

#: Put behind the last call.
END = None

#: The items of calls that wait for `load` alone.
LOAD_ONLY = (None,)

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
        #: The options as the user wrote them, for a batcher that is made of this one.
        self.given_options: Mapping[str, Any] = {}
        self.options = options = loop.options
        #: What items are checked by, in their caller's thread.
        self.collator = loop.collator
        #: Whose items they are where the call does not say.
        self.usual_lane = Lane(next(iter(options.classes)))
        self._loop = loop
        self._incoming: SimpleQueue[Call | None] = SimpleQueue()
        self._space: Space | None = None
        if options.max_waiting is not None:
            self._space = Space(options.max_waiting)
            loop.on_taken = self._space.free
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: What is called before the first batch; until it has succeeded, every batch fails.
        self.load: Callable[[], object] | None = None
        #: How many items the next batch waits for, and until when.
        self._expected, self._expected_s = 0, 0.0
        #: What is called after the last batch, on the thread.
        self.unload: Callable[[], object] = lambda: None
        #: Calls that wait for `load` alone.
        self._starting: list[Call] = []
        #: Why no call is taken any more.
        self._problem: str | None = None
        self._has_ended = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self._loop.name

    @property
    def function(self) -> Callable[..., Any]:
        """The batch function; of a method, it takes the owner first."""
        return self._loop.function

    @property
    def stats(self) -> BatcherStats:
        """What the batches looked like so far."""
        return self._loop.stats(self._loop.waiting + self._incoming.qsize())

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
        if self._thread is threading.current_thread() and (waits or self._loop.is_computing):
            raise BatchArgumentError(
                f"{self.name}: its function calls the batcher that runs it, and would wait for"
                " itself; call the bare function. A callback of a future may only submit"
            )

    def has_space(self, items: int) -> bool:
        """Takes space for items; False if the caller must wait for it.

        Raises:
            QueueFull: There is none, and callers are refused.
        """
        if self._space is None or self._space.take(items):
            return True
        if self.options.when_full == "refuse":
            stats = self.stats
            error = QueueFull(
                f"{self.name}: {stats.waiting} items wait, and max_waiting is"
                f" {self.options.max_waiting}; try again later"
            )
            rate = stats.mean_batch_size / stats.mean_run_ms if stats.mean_run_ms else 0.0
            error.retry_after_s = stats.waiting / rate / 1e3 if rate else UNKNOWN_WAIT_S
            raise error
        return False

    def wait_for_space(self, items: int, timeout_s: float | None) -> bool:
        """Waits until there is space for items, and takes it; False if there was none in time."""
        assert self._space is not None
        self.check()
        return self._space.wait(items, timeout_s)

    async def wait_for_space_async(self, items: int) -> None:
        """The same, without blocking the event loop."""
        assert self._space is not None
        await self._space.wait_async(items)

    def send(self, call: Call) -> None:
        """Queues a call, for which there is space.

        Raises:
            BatcherClosed: It was closed before its first call.
        """
        if self._thread is None:
            self._start()
        call.sent_s = monotonic()
        self._incoming.put(call)
        if self._has_ended:
            self._refuse_rest()

    def start(self) -> None:
        """Loads now, and waits until that is done."""
        self.check()
        call = ThreadCall(LOAD_ONLY, False)
        self.send(call)
        call.wait(None)
        call.result()

    async def start_async(self) -> None:
        """The same, without blocking the event loop."""
        self.check()
        call = LoopCall(LOAD_ONLY, False)
        self.send(call)
        await call.wait()
        call.result()

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
                if self._space is not None:
                    self._space.close()
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def forked(self) -> None:
        """Notes that this process is a copy of the one that has the thread."""
        self._problem = "it was used before this process was forked; make it after the fork"
        self._thread = None
        # The parent's threads may have held its locks.
        self._lock = threading.Lock()
        self._incoming = SimpleQueue()

    def _start(self) -> None:
        with self._lock:
            if self._problem is not None:
                raise self._closed()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._main, name=f"batchery-{self.name}", daemon=True
                )
                _started.add(self)
                self._thread.start()

    def _main(self) -> None:
        try:
            while self._take_in():
                self._turn()
            while self._loop.waiting:
                self._turn(draining=True)
        finally:
            self._has_ended = True
            if self._space is not None:
                self._space.close()
            self._loop.fail_all(self._closed())
            self._refuse_rest()
            self._loop.close()
            self.unload()

    def _turn(self, *, draining: bool = False) -> None:
        try:
            if self.load is not None:
                self.load()
                self.load = None
            while self._starting:
                self._starting.pop().finish()
            self._loop.turn(draining=draining)
            if self._loop.answered_threads:
                self._expect_answered_threads()
        except BaseException as error:  # noqa: BLE001 - callers wait, whatever happened
            problem = as_exception(error, self.name)
            self._loop.fail_all(problem)
            while self._starting:
                self._starting.pop().fail(problem)

    def _take_in(self) -> bool:
        """Takes in what was called; waits if nothing is due. Returns False at the end."""
        loop = self._loop
        if not self._take(self._timeout_s()):
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
        if call is END:
            return False
        self._admit(call)
        return self._take_in_waiting()

    def _take_in_waiting(self) -> bool:
        """Takes in what was called so far. Returns False at the end."""
        try:
            while True:
                call = self._incoming.get_nowait()
                if call is END:
                    return False
                self._admit(call)
        except Empty:
            return True

    def _admit(self, call: Call) -> None:
        if call.items is LOAD_ONLY:
            self._starting.append(call)
        else:
            self._loop.admit(call)

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

    def _timeout_s(self) -> float | None:
        """How long to wait for calls, in seconds; None for as long as it takes."""
        if self._starting:
            return 0.0  # They came while a batch ran, and `look_ahead` took them in.
        wake_s = self._loop.wake_s()
        return None if wake_s is None else limited(wake_s - monotonic())

    def _closed(self) -> BatcherClosed:
        return BatcherClosed(f"{self.name}: {self._problem or 'its thread has ended'}")

    def _refuse_rest(self) -> None:
        """Fails the calls that came behind the end."""
        error = self._closed()
        while self._starting:
            self._starting.pop().fail(error)
        try:
            while True:
                call = self._incoming.get_nowait()
                if call is not END:
                    call.fail(error)
        except Empty:
            pass


def send_and_wait(thread: BatcherThread, call: ThreadCall, timeout_s: float | None) -> bool:
    """Sends a call and waits for its answer; False if there is none in time."""
    end_s = None if timeout_s is None else monotonic() + timeout_s
    items = call.left
    if not items:
        return True
    if not thread.has_space(items) and not thread.wait_for_space(items, timeout_s):
        return False
    thread.send(call)
    try:
        is_answered = call.wait(None if end_s is None else end_s - monotonic())
    except BaseException:
        call.is_abandoned = True
        raise
    call.is_abandoned = not is_answered
    return is_answered


async def send_and_await(thread: BatcherThread, call: LoopCall) -> None:
    """Sends a call and waits for its answer, without blocking the event loop."""
    items = call.left
    if not items:
        return
    if not thread.has_space(items):
        await thread.wait_for_space_async(items)
    thread.send(call)
    try:
        await call.wait()
    except BaseException:
        call.is_abandoned = True
        raise


def _forked() -> None:
    for thread in list(_started):
        thread.forked()


def _drain_all() -> None:
    for thread in list(_started):
        thread.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_drain_all)
