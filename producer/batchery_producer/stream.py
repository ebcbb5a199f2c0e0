"""The loop of every client that sends many jobs: some in flight, answers as they come.

`Window` says how many jobs to send, and is pure. `Stream` does one round: it sends jobs, takes
answers, and removes results from the backend that were taken. `ItemRun` is a stream of a caller's
items, for `map` and `as_completed` of both clients.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

from celery import Celery

from batchery.errors import BatcheryError, NoResult
from batchery.protocol.headers import deadline_header
from batchery.retry import RetryPolicy
from batchery_producer.answers import (
    Answer,
    Outcome,
    build_header,
    check_per_job,
    read_outcomes,
)
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import Collector, collector_for
from batchery_producer.diagnosis import explain_stall
from batchery_producer.publisher import Publisher
from batchery_producer.template import uuids

logger = logging.getLogger(__name__)

#: The caller's reference for a job.
V = TypeVar("V")

#: Id of a job that has ended, its reference, and how it ended.
Ended = tuple[str, V, Answer]

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

#: Time without a result after which the user is told once what the client waits for, in seconds.
HINT_S = 20.0

#: Items in flight: some batches for each of several devices, and still little memory.
WINDOW = 8192


class Window(Generic[V]):
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
        self._jobs: OrderedDict[str, V] = OrderedDict()
        self._ended: dict[str, Answer] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def in_flight(self) -> list[str]:
        """The jobs that have not ended, oldest first."""
        return [task_id for task_id in self._jobs if task_id not in self._ended]

    @property
    def free(self) -> int:
        """How many jobs may still be added."""
        return self.size - len(self._jobs)

    @property
    def to_send(self) -> int:
        """How many jobs to send now; 0 while so few are free that it is not worth a round trip."""
        worth_sending = min(self.size * SEND_SHARE, SEND_JOBS)
        return min(self.free, SEND_JOBS) if self.free >= worth_sending or not self._jobs else 0

    def add(self, jobs: Mapping[str, V]) -> None:
        """Notes jobs that are about to be sent.

        Raises:
            ValueError: The window has no space for them.
        """
        if len(jobs) > self.free:
            raise ValueError(f"{len(jobs)} jobs for a window with {self.free} free")
        self._jobs.update(jobs)

    def end(self, task_id: str, answer: Answer) -> Sequence[Ended[V]]:
        """Takes out a job that has ended; an ordered window may hold it, or release others with it.

        Raises:
            KeyError: The job is not in flight.
        """
        if self._ordered and task_id != next(iter(self._jobs), None):
            if task_id not in self._jobs or task_id in self._ended:
                raise KeyError(task_id)
            self._ended[task_id] = answer
            return ()
        released = [(task_id, self._jobs.pop(task_id), answer)]
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
        window: Window[V],
        source: JobSource[V],
        publisher: Publisher,
        *,
        missing: Callable[[Sequence[str]], Sequence[str]] = lambda task_ids: task_ids,
        keep_results: bool = False,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
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
            timeout_s: How long no job may end, in seconds; None for ever.
            deadline_s: In how many seconds from being sent each job should be answered.
            explain: Says why no results may come.
            notice: Gets a line for the user when no results came for a while.
        """
        self.window = window
        self.collector = collector
        self._source = source
        self._publisher = publisher
        self._missing = missing
        self._keep_results = keep_results
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._explain = explain
        self._notice = notice
        self._discarded: list[str] = []
        self._unsent: set[str] = set()
        self._is_told = False
        self._flushed_s = time.monotonic()
        self._note_progress()

    @property
    def is_done(self) -> bool:
        """Whether every job has ended, and none will follow."""
        return self._source.exhausted and not self.window

    @property
    def sent(self) -> Sequence[str]:
        """Ids of the jobs that were sent, as far as known, and have not ended."""
        return [task_id for task_id in self.window.in_flight if task_id not in self._unsent]

    def step(self) -> Iterator[Ended[V]]:
        """Sends jobs and yields those that have ended, if any: id, reference and answer.

        Raises:
            NoResult: None has come for longer than the timeout.
            BatcheryError: As the publisher, the collector and the source do.
        """
        wait_s = 0.0 if self._send() else self._wait_s()
        yield from self.take(self.collector.collect(wait_s))
        waited_s = time.monotonic() - self._progress_s
        if self.window and self._timeout_s is not None and waited_s > self._timeout_s:
            raise NoResult(f"no result for {self._timeout_s:g} s: {self._explain()}")
        if self.window and waited_s > HINT_S and not self._is_told:
            self._is_told = True
            self._notice(f"no result for {waited_s:.0f} s: {self._explain()}")

    def take(self, answers: Iterator[tuple[str, Answer]]) -> Iterator[Ended[V]]:
        """Takes the jobs that have these answers out of the window, and yields them."""
        for task_id, answer in answers:
            self._note_progress()
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

    def _note_progress(self) -> None:
        self._progress_s, self._is_told = time.monotonic(), False

    def _wait_s(self) -> float:
        if not self.window:
            return 0.0
        waits_for_input = self.window.to_send and not self._source.exhausted
        return SLOW_INPUT_S if waits_for_input else WAIT_S

    def _send(self) -> int:
        count = self.window.to_send
        if not count or self._source.exhausted:
            return 0
        # With no job in flight, there is nothing but the input to wait for.
        jobs = self._source.take(count, 0.0 if self.window else WAIT_S)
        if not jobs:
            return 0
        if not self.window:
            self._note_progress()
        by_id = {job.id: job for job in jobs}
        # In flight before they are sent, because a failed attempt may have sent them.
        self.window.add({job.id: job.ref for job in jobs})
        self.collector.expect(by_id)
        missing = [by_id[task_id] for task_id in self._missing(list(by_id))]
        self._unsent = {job.id for job in missing}
        for count, group in groupby(missing, key=lambda job: job.item_count):
            headers = {
                **deadline_header(self._deadline_s),
                **build_header(count, self.collector.headers),
            }
            some, before = [(job.id, job.item) for job in group], self._publisher.sent
            try:
                self._publisher.send(some, headers)
            finally:
                sent = some[: self._publisher.sent - before]
                self._unsent.difference_update(task_id for task_id, _ in sent)
        return len(jobs)


class Progress(NamedTuple):
    """How far a run is, in items."""

    sent: int
    done: int
    failed: int


class ItemOptions(TypedDict, total=False):
    """Options of `map` and `as_completed`.

    Attributes:
        keywords: Keyword arguments of all jobs.
        per_job: Number of items in one message. Workers form batches of items, whatever messages
            they came in; larger messages mean less work for all but the device.
        window: Maximum number of items in flight.
        timeout_s: Give up when no result has come for so long, in seconds; by default never. It
            bounds sending, waiting and cleaning up together.
        keep_results: Leave results in the backend, until they expire.
        progress: Called several times a second, with a `Progress`.
    """

    keywords: Mapping[str, Any] | None
    per_job: int | None
    window: int
    timeout_s: float | None
    keep_results: bool
    progress: Callable[[Progress], None]


class ItemRun:
    """Items go through a window as jobs, and their outcomes come back.

    Whoever runs it puts items into its room, does a `step`, and again until it `is_done`.

    Attributes:
        taken: Number of items that are in jobs so far.
        error: Why reading the items ended before its time; to be raised in the end.
        is_stopped: Set it to end attempts to reach a Redis that is away.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        options: Mapping[str, Any],
        *,
        ordered: bool,
        deadline_s: float | None = None,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
        keep_results: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Prepares; `options` are those of a `Publisher`, all others those of `ItemOptions`.

        Raises:
            BatchArgumentError: A number is out of range.
        """
        self._per_job = check_per_job(per_job)
        self._items: list[Any] = []
        self._has_ended = self.is_stopped = False
        self.error: Exception | None = None
        self.taken = self._done = self._failed = 0
        self._progress = progress
        # One for all: once Redis stays away, nothing else waits for it, and nothing can be revoked.
        retries = RetryPolicy.within(timeout_s, lambda: self.is_stopped)
        self._backend = app.backend
        self._broker = BrokerConnection(app, retries, persistent=True)
        sending = {"wait_s": timeout_s, **options, "keywords": keywords}
        self._stream = Stream(
            collector_for(app, retries),
            Window[range](max(window // (self._per_job or 1), 1), ordered=ordered),
            self,
            Publisher(app, task, broker=self._broker, **sending),
            keep_results=keep_results,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            explain=partial(explain_stall, app, task, options),
        )

    @property
    def room(self) -> int:
        """How many more items the next step has use for."""
        wanted = self._stream.window.to_send * (self._per_job or 1)
        return 0 if self._has_ended else max(wanted - len(self._items), 0)

    def put(self, item: Any) -> None:
        """Adds the next item."""
        self._items.append(item)

    def end(self, error: Exception | None = None) -> None:
        """Says that no items will follow, and why if not for good; those before become jobs."""
        self.error, self._has_ended = error, True

    @property
    def is_done(self) -> bool:
        """Whether every item has its outcome, and none will follow."""
        return self._stream.is_done

    @property
    def exhausted(self) -> bool:
        """As `JobSource.exhausted`."""
        return self._has_ended and not self._items

    def take(self, maximum: int, _wait_s: float) -> Sequence[NewJob[range]]:
        """As `JobSource.take`; does not wait."""
        size, count = self._per_job or 1, len(self._items)
        count = min(maximum * size, count if self._has_ended else count // size * size)
        starts, jobs = range(0, count, size), []
        for task_id, start in zip(uuids(len(starts)), starts, strict=True):
            part = self._items[start : min(start + size, count)]
            indexes = range(self.taken, self.taken + len(part))
            self.taken = indexes.stop
            item, item_count = (part, len(part)) if self._per_job else (part[0], 0)
            jobs.append(NewJob(task_id, item, item_count, indexes))
        del self._items[:count]
        return jobs

    def step(self) -> Iterator[Outcome]:
        """Sends jobs, and yields outcomes; raises as `TaskClient.as_completed`."""
        for task_id, indexes, answer in self._stream.step():
            self._stream.discard(task_id)
            for outcome in read_outcomes(answer, indexes, self._per_job > 0, self._backend):
                self._done += 1
                self._failed += outcome.error is not None
                yield outcome
        if self._stream.flush_is_due:
            self._stream.flush()
        self._progress(Progress(self.taken, self._done, self._failed))

    def close(self) -> None:
        """Revokes jobs that were not begun, and leaves nothing else behind in Redis."""
        if not self._broker.retries.is_spent:
            with suppress(BatcheryError, OSError):
                self._stream.flush()
                self._broker.revoke(self._stream.sent)
        self._stream.collector.close()
        self._broker.close()
