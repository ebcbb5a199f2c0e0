"""The thread that runs the batches of one function, and how calls get there.

While nothing is called, the thread sleeps; nothing wakes it up.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from batchery.errors import BatchArgumentError, BatcherClosed, QueueFull
from batchery.execution.bisect_failures import as_exception
from batchery.outcomes import Failed
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.inprocess.batch_runner import BatcherStats, BatchRunner, Item
from batchery_worker.inprocess.calls import Call, settle
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

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

    def __init__(self, runner: BatchRunner) -> None:
        self.name = runner.name
        self.options = options = runner.options
        self.runner = runner
        #: Whose items they are where the call does not say.
        self.usual_lane = Lane(next(iter(options.classes)))
        #: What is called before the first batch; until it has succeeded, every batch fails.
        self.load: Callable[[], object] | None = None
        #: What is called after the last batch, on the thread.
        self.unload: Callable[[], object] = lambda: None
        target_s = options.target_latency_ms and options.target_latency_ms / 1e3
        self._limits = Limits(options.max_batch_size, options.max_wait_ms / 1e3, target_s)
        self._usual_key = BatchKey(self.name)
        self._scheduler: Scheduler[Item] = Scheduler(options.classes)
        #: The jobs of the batch that runs.
        self._running: Sequence[Job[Item]] = ()
        #: Calls; futures of those who wait for `load` alone; then the end.
        self._incoming: SimpleQueue[Call | Future[None] | None] = SimpleQueue()
        #: How many items wait.
        self._waiting = 0
        #: For all that callers change. Reentrant, as whatever ends with its anchor is closed by the
        #: garbage collector, in the middle of anything.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        #: How many items the next batch waits for, and until when.
        self._expected, self._expected_s = 0, 0.0
        #: Why no call is taken any more.
        self._problem: str | None = None
        #: Whether all calls were taken in that will ever come.
        self._is_ending = False

    @property
    def stats(self) -> BatcherStats:
        """What the batches looked like so far."""
        with self._lock:
            return replace(self.runner.stats, waiting=self._waiting)

    def check(self, *, is_blocking: bool) -> None:
        """Makes sure that a call would be answered.

        Args:
            is_blocking: Whether the calling thread waits for the answer.

        Raises:
            BatcherClosed: It would not.
            BatchArgumentError: The batch function itself calls, or a callback of a future that
                waits, and would wait for itself.
        """
        if self._problem is not None:
            raise self._closed()
        if self._is_own_thread() and (is_blocking or self.runner.is_computing):
            raise BatchArgumentError(
                f"{self.name}: its function calls the batcher that runs it, and would wait for"
                " itself; call the bare function. A callback of a future may only submit"
            )

    def send(self, call: Call) -> None:
        """Queues a call.

        Raises:
            QueueFull: There is no space for it.
            BatcherClosed: It is closed.
        """
        with self._lock:
            if self._problem is not None:
                raise self._closed()
            # One that is larger than all of the space goes in alone.
            maximum = self.options.max_waiting
            if maximum is not None and 0 < self._waiting > maximum - call.left:
                raise self._full()
            call.sent_s = monotonic()
            self._waiting += call.left
            self._put(call)

    def start(self) -> "Future[None]":
        """Loads now; the future is done when that is."""
        future: Future[None] = Future()
        with self._lock:
            if self._problem is not None:
                raise self._closed()
            self._put(future)
        return future

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
                self._incoming.put(END)
        if wait and thread is not None and not self._is_own_thread():
            thread.join()

    def forked(self) -> None:
        """Notes that this process is a copy of the one that has the thread."""
        self._problem = "it was used before this process was forked; make it after the fork"
        self._thread = None
        # The parent's threads may have held its locks.
        self._lock = threading.RLock()
        self._incoming = SimpleQueue()

    def _is_own_thread(self) -> bool:
        return self._ident == threading.get_ident()

    def _put(self, call: "Call | Future[None]") -> None:
        """Queues a call, or a load; the lock must be held."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._main, name=f"batchery-{self.name}", daemon=True
            )
            _started.add(self)
            self._thread.start()
            self._ident = self._thread.ident
        self._incoming.put(call)

    def _main(self) -> None:
        while not self._is_ending or self._scheduler.holds_any:
            try:
                self._take_in()
                if self._scheduler.holds_any:
                    self._load()
                self._run_next()
            except BaseException as error:  # noqa: BLE001 - callers wait, whatever happened
                self._fail_all(as_exception(error, self.name))
        self.runner.close()
        self.unload()

    def _load(self) -> None:
        if self.load is not None:
            self.load()
            self.load = None

    def _take_in(self) -> None:
        """Takes in what was called; waits if nothing is due."""
        due_s = self._scheduler.wake_s()
        self._take_in_within(inf if due_s is None else due_s - monotonic())
        while len(self._scheduler) < self._expected:
            if self._is_ending or (left_s := self._expected_s - monotonic()) <= 0:
                break
            self._take_in_within(left_s)
        self._expected = 0

    def _take_in_within(self, timeout_s: float) -> None:
        """Takes in what is there, and waits for it if need be."""
        with suppress(Empty):
            while not self._is_ending:
                self._admit(
                    self._incoming.get(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
                )
                timeout_s = 0.0

    def _admit(self, call: "Call | Future[None] | None") -> None:
        if call is END:
            self._is_ending = True
        elif isinstance(call, Call):
            self._admit_items(call)
        elif call.set_running_or_notify_cancel():
            try:
                self._load()
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits
                call.set_exception(as_exception(error, self.name))
            else:
                call.set_result(None)

    def _admit_items(self, call: Call) -> None:
        """Makes jobs of the items; they wait for their turn."""
        key = BatchKey(self.name, call.key) if call.key else self._usual_key
        for index in range(len(call.items)):
            payload = call, index
            self._scheduler.admit(Job("", key, self._limits, 1, call.sent_s, payload, call.lane))

    def _run_next(self) -> None:
        """Runs the next batch, if one is due."""
        now_s = monotonic()
        # At the end no more calls come, so no batch waits for them.
        ahead_s = self._limits.max_wait_s if self._is_ending else 0.0
        batch = self._scheduler.next_batch(0, False, now_s + ahead_s, left_s=-ahead_s)
        if batch is None:
            return
        self._let_go(batch.jobs)
        self._running = batch.jobs
        calls = {job.payload[0] for job in batch.jobs}
        if gone := {call for call in calls if call.future.cancelled()}:
            self._drop([job for job in batch.jobs if job.payload[0] in gone])
            self._running = [job for job in batch.jobs if job.payload[0] not in gone]
        if self._running:
            self._run(batch, self._running, now_s)
        else:
            self._scheduler.ended(batch, None)
        self._running = ()

    def _run(self, batch: Batch[Item], jobs: Sequence[Job[Item]], now_s: float) -> None:
        """Runs a batch; the callers of each part are answered as soon as it has run."""
        stats, before_s = self.runner.stats, self.runner.stats.run_s
        stats.batches += 1
        stats.wait_s += sum([now_s - job.arrived_s for job in jobs])
        answered_threads = 0
        for part in self.runner.cut([job.payload for job in jobs]):
            began_s = monotonic()
            outcomes = self.runner.run(part)
            stats.run_s += monotonic() - began_s
            stats.items += len(part)
            # Threads of earlier parts may have called again by now.
            answered_threads = self._answer(part, outcomes)
        # Only now, while those who were answered wake up.
        self._scheduler.ended(batch, stats.run_s - before_s)
        if answered_threads:
            self._expect(answered_threads + self._waiting)

    def _expect(self, items: int) -> None:
        """Notes how many items wait as soon as the threads that were answered have called again.

        They wake up one after the other, and most call again at once. A batch that left meanwhile
        would run without them, and the next one without the others, for ever.
        """
        items = min(items, self.options.max_batch_size)
        limit_s = MAX_LINGER_SHARE * self._scheduler.costs.expected_s(self.name, items)
        if items > 1 and limit_s > MIN_LINGER_S:
            self._expected, self._expected_s = items, monotonic() + limit_s

    def _answer(self, items: Sequence[Item], outcomes: Sequence[Any]) -> int:
        """Hands outcomes to their callers; returns how many threads were answered."""
        ended = [
            call
            for (call, index), outcome in zip(items, outcomes, strict=True)
            if call.answer(index, outcome)
        ]
        self.runner.stats.failed += sum([isinstance(each, Failed) for each in outcomes])
        settle(ended)
        return sum([call.is_blocking for call in ended])

    def _drop(self, jobs: Sequence[Job[Item]]) -> None:
        """Answers jobs whose callers have given up."""
        self.runner.stats.dropped += len(jobs)
        self._answer([job.payload for job in jobs], [None] * len(jobs))

    def _let_go(self, jobs: Sequence[Job[Item]]) -> None:
        """Notes that jobs wait no longer."""
        with self._lock:
            self._waiting -= len(jobs)

    def _fail_all(self, error: BaseException) -> None:
        """Fails every call that was taken in, or that the batch under way has not answered."""
        running, self._running = self._running, ()
        jobs = self._scheduler.clear()
        self._let_go(jobs)
        for call in dict.fromkeys(job.payload[0] for job in (*running, *jobs)):
            if call.left:
                call.fail(error)

    def _full(self) -> QueueFull:
        stats, waiting = self.runner.stats, self._waiting
        error = QueueFull(
            f"{self.name}: {waiting} items wait, and max_waiting is"
            f" {self.options.max_waiting}; try again later"
        )
        item_s = stats.run_s / stats.items if stats.items else 0.0
        error.retry_after_s = waiting * item_s or UNKNOWN_WAIT_S
        return error

    def _closed(self) -> BatcherClosed:
        return BatcherClosed(f"{self.name}: {self._problem}")


def _forked() -> None:
    for thread in list(_started):
        thread.forked()


def _drain_all() -> None:
    for thread in list(_started):
        thread.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_drain_all)
