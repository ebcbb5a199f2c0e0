"""The loop of every client that sends many jobs: some in flight, answers as they come.

`Window` says how many jobs to send, and is pure. `Stream` does one round: it sends jobs, takes
answers, and removes results from the backend that were taken.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from batchery_producer.answers import Answer, build_header
from batchery_producer.collector import Collector
from batchery_producer.diagnosis import StallDetector
from batchery_producer.publisher import Publisher

logger = logging.getLogger(__name__)

#: Id of a job in flight, the caller's reference for it, and how it ended.
K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E")

#: Part of the window that must be free before jobs are sent while others are in flight: a few jobs
#: cost as much as many.
SEND_SHARE = 1 / 8

#: Maximum number of jobs that are sent between two looks for results.
SEND_JOBS = 1000

#: How long one round waits for results, in seconds; a request to stop is noticed that late.
WAIT_S = 0.25

#: How long a round waits for results while more input may come at any moment, in seconds.
SLOW_INPUT_S = 0.02

#: How often results are made durable and removed from the backend, in seconds.
FLUSH_S = 0.5


class Window(Generic[K, V, E]):
    """Jobs in flight, oldest first; an ordered window holds ended jobs until all older ones end."""

    def __init__(self, size: int, *, ordered: bool = False) -> None:
        """Starts empty.

        Args:
            size: Maximum number of jobs, at least 1.
            ordered: Whether jobs leave in the order in which they were added.

        Raises:
            ValueError: The size is less than 1.
        """
        if size < 1:
            raise ValueError(f"window of {size} jobs: must be 1 or more")
        self.size = size
        self._ordered = ordered
        # A plain dict looks for its oldest entry among all that were removed before it.
        self._jobs: OrderedDict[K, V] = OrderedDict()
        self._ended: dict[K, E] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def in_flight(self) -> list[K]:
        """The jobs that have not ended, oldest first."""
        return [key for key in self._jobs if key not in self._ended]

    @property
    def free(self) -> int:
        """How many jobs may still be added."""
        return self.size - len(self._jobs)

    @property
    def to_send(self) -> int:
        """How many jobs to send now; 0 while so few are free that it is not worth a round trip."""
        worth_sending = min(self.size * SEND_SHARE, SEND_JOBS)
        return min(self.free, SEND_JOBS) if self.free >= worth_sending or not self._jobs else 0

    def add(self, jobs: Mapping[K, V]) -> None:
        """Notes jobs that are about to be sent.

        Raises:
            ValueError: The window has no space for them.
        """
        if len(jobs) > self.free:
            raise ValueError(f"{len(jobs)} jobs for a window with {self.free} free")
        self._jobs.update(jobs)

    def end(self, key: K, ending: E) -> Sequence[tuple[K, V, E]]:
        """Takes out a job that has ended; an ordered window may hold it, or release others with it.

        Raises:
            KeyError: The job is not in flight.
        """
        if self._ordered and key != next(iter(self._jobs), None):
            if key not in self._jobs or key in self._ended:
                raise KeyError(key)
            self._ended[key] = ending
            return ()
        released = [(key, self._jobs.pop(key), ending)]
        while self._ended and (oldest := next(iter(self._jobs))) in self._ended:
            released.append((oldest, self._jobs.pop(oldest), self._ended.pop(oldest)))
        return released


class NewJob(NamedTuple, Generic[V]):
    """A job to be sent.

    Attributes:
        id: Of the task.
        item: The argument; a list if the job carries several items.
        item_count: How many items the list has; 0 if the argument is one item.
        ref: The caller's reference, which it gets back when the job ends.
    """

    id: str
    item: Any
    item_count: int
    ref: V


class JobSource(Protocol[V]):
    """Where jobs come from."""

    @property
    def exhausted(self) -> bool:
        """Whether no job will follow."""

    def take(self, maximum: int, wait_s: float) -> Sequence[NewJob[V]]:
        """The next jobs that are available.

        Args:
            maximum: Number of jobs.
            wait_s: How long to wait for the first one, in seconds.
        """


class Stream(Generic[V]):
    """Sends jobs through a window, and yields their answers."""

    def __init__(
        self,
        collector: Collector,
        window: Window[str, V, Answer],
        source: JobSource[V],
        publisher: Publisher,
        *,
        missing: Callable[[Sequence[str]], Sequence[str]] = lambda task_ids: task_ids,
        keep_results: bool = False,
        timeout_s: float | None = None,
        explain: Callable[[], str] = lambda: "",
        notice: Callable[[str], None] = logger.warning,
    ) -> None:
        """Prepares.

        Args:
            collector: Fetches results.
            window: Limits the jobs in flight.
            source: Gives jobs.
            publisher: Sends the jobs of the source.
            missing: Says which jobs must be sent; the others are in flight already.
            keep_results: Leave results in the backend, until they expire.
            timeout_s: How long no job may end before the stream is stalled, in seconds.
            explain: Says why no results may come.
            notice: Gets a line for the user when no results came for a while.
        """
        self.window = window
        self.collector = collector
        self._source = source
        self._publisher = publisher
        self._stall = StallDetector(explain, notice, timeout_s)
        self._missing = missing
        self._keep_results = keep_results
        self._discarded: list[str] = []
        self._unsent: set[str] = set()
        self._flushed_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether every job has ended, and none will follow."""
        return self._source.exhausted and not self.window

    @property
    def sent(self) -> Sequence[str]:
        """Ids of the jobs that were sent, as far as known, and have not ended."""
        return [task_id for task_id in self.window.in_flight if task_id not in self._unsent]

    def step(self, wait_s: float = WAIT_S) -> Iterator[tuple[str, V, Answer]]:
        """Sends jobs and yields those that have ended, if any: id, reference and answer.

        Raises:
            BatcheryError: As the publisher, the collector and the source do.
        """
        sent = self._send()
        yield from self.take(self.collector.collect(0.0 if sent else self._wait_s(wait_s)))

    def take(self, answers: Iterator[tuple[str, Answer]]) -> Iterator[tuple[str, V, Answer]]:
        """Takes the jobs that have these answers out of the window, and yields them."""
        for task_id, answer in answers:
            self._stall.progressed()
            yield from self.window.end(task_id, answer)

    def discard(self, task_id: str) -> None:
        """Has the next flush remove a result from the backend, unless results are kept."""
        if not self._keep_results:
            self._discarded.append(task_id)

    @property
    def flush_is_due(self) -> bool:
        """Whether the last flush was long enough ago."""
        return time.monotonic() - self._flushed_s >= FLUSH_S

    def flush(self) -> None:
        """Removes discarded results from the backend; the caller must have stored them by now."""
        self._flushed_s = time.monotonic()
        self.collector.forget(self._discarded)
        self._discarded.clear()

    def stalled(self) -> str:
        """Why no job has ended for longer than the timeout; empty otherwise."""
        return self._stall.check() if self.window else ""

    def _wait_s(self, maximum_s: float) -> float:
        if not self.window:
            return 0.0
        waits_for_input = self.window.to_send and not self._source.exhausted
        return min(SLOW_INPUT_S, maximum_s) if waits_for_input else maximum_s

    def _send(self) -> int:
        count = self.window.to_send
        if not count or self._source.exhausted:
            return 0
        # With no job in flight, there is nothing but the input to wait for.
        jobs = self._source.take(count, 0.0 if self.window else WAIT_S)
        if not jobs:
            return 0
        if not self.window:
            self._stall.progressed()
        by_id = {job.id: job for job in jobs}
        # In flight before they are sent, because a failed attempt may have sent them.
        self.window.add({job.id: job.ref for job in jobs})
        self.collector.expect(by_id)
        missing = [by_id[task_id] for task_id in self._missing(list(by_id))]
        self._unsent = {job.id for job in missing}
        for count, group in groupby(missing, key=lambda job: job.item_count):
            headers = build_header(count, self.collector.headers)
            some, before = [(job.id, job.item) for job in group], self._publisher.sent
            try:
                self._publisher.send(some, headers)
            finally:
                sent = some[: self._publisher.sent - before]
                self._unsent.difference_update(task_id for task_id, _ in sent)
        return len(jobs)
