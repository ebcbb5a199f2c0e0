"""The loop of every client that sends many jobs: some in flight, answers as they come.

`Stream` does one round: it sends jobs, takes answers, and removes results from the backend that
were taken. `ItemRun` is a stream of a caller's items, for `Client.map` and `as_completed`.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

from celery import Celery

from batchery.errors import BatcheryError, NoResult
from batchery.retry import RetryPolicy
from batchery_producer.answers import (
    Answer,
    Outcome,
    build_header,
    check_per_job,
    read_outcomes,
)
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import Collector
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


class Stream(Generic[V]):
    """Sends jobs through a window, and yields their answers.

    Attributes:
        in_flight: References of the jobs that have not ended, by their ids, oldest first.
        collector: Fetches results.
        discarded: Jobs whose results the next flush removes from the backend.
    """

    def __init__(
        self,
        collector: Collector,
        publisher: Publisher,
        window: int,
        *,
        missing: Callable[[Sequence[str]], Sequence[str]] = lambda task_ids: task_ids,
        timeout_s: float | None = None,
        explain: Callable[[], str] = lambda: "",
        notice: Callable[[str], None] = logger.warning,
    ) -> None:
        """Prepares.

        Args:
            collector: Fetches results.
            publisher: Sends the jobs.
            window: Maximum number of jobs in flight, at least 1.
            missing: Says which jobs must be sent; the others are in flight already.
            timeout_s: How long no job may end, in seconds; None for ever.
            explain: Says why no results may come.
            notice: Gets a line for the user when no results came for a while.

        Raises:
            ValueError: The window is less than 1.
        """
        if window < 1:
            raise ValueError(f"window of {window} jobs: must be 1 or more")
        self.collector = collector
        # A plain dict looks for its oldest entry among all that were removed before it.
        self.in_flight: OrderedDict[str, V] = OrderedDict()
        self.discarded: list[str] = []
        self._publisher = publisher
        self._window = window
        self._missing = missing
        self._timeout_s = timeout_s
        self._explain = explain
        self._notice = notice
        self._unsent: set[str] = set()
        self._is_told = False
        self._flushed_s = self._progress_s = time.monotonic()

    @property
    def sent(self) -> Sequence[str]:
        """Ids of the jobs that were sent, as far as known, and have not ended."""
        return [task_id for task_id in self.in_flight if task_id not in self._unsent]

    def room(self, held: int = 0) -> int:
        """How many jobs to send now; 0 while so few are free that it is not worth a round trip.

        Args:
            held: Number of jobs that have ended, and take up room nevertheless.
        """
        free = self._window - len(self.in_flight) - held
        is_worth_it = free >= min(self._window * SEND_SHARE, SEND_JOBS) or not self.in_flight
        return min(free, SEND_JOBS) if is_worth_it else 0

    def step(self, jobs: Sequence[NewJob[V]], *, has_room: bool) -> Iterator[Ended[V]]:
        """Sends jobs and yields those that have ended, if any: id, reference and answer.

        Args:
            jobs: Those that there are, no more than there is room for.
            has_room: Whether further jobs may come at any moment, and be sent.

        Raises:
            NoResult: None has come for longer than the timeout.
            BatcheryError: As the publisher and the collector do.
        """
        wait_s = SLOW_INPUT_S if has_room else WAIT_S
        if jobs:
            self._send(jobs)
        yield from self.take(self.collector.collect(wait_s if self.in_flight and not jobs else 0))
        waited_s = time.monotonic() - self._progress_s
        if self.in_flight and self._timeout_s is not None and waited_s > self._timeout_s:
            raise NoResult(f"no result for {self._timeout_s:g} s: {self._explain()}")
        if self.in_flight and waited_s > HINT_S and not self._is_told:
            self._is_told = True
            self._notice(f"no result for {waited_s:.0f} s: {self._explain()}")

    def take(self, answers: Iterator[tuple[str, Answer]]) -> Iterator[Ended[V]]:
        """Takes the jobs that have these answers out of the window, and yields them."""
        for task_id, answer in answers:
            self._note_progress()
            yield task_id, self.in_flight.pop(task_id), answer

    @property
    def flush_is_due(self) -> bool:
        """Whether the last flush was long enough ago."""
        return time.monotonic() - self._flushed_s >= FLUSH_S

    def flush(self) -> None:
        """Removes discarded results from the backend; the caller must have stored them by now."""
        self._flushed_s = time.monotonic()
        self.collector.forget(self.discarded)
        self.discarded.clear()

    def _note_progress(self) -> None:
        self._progress_s, self._is_told = time.monotonic(), False

    def _send(self, jobs: Sequence[NewJob[V]]) -> None:
        if not self.in_flight:
            self._note_progress()
        by_id = {job.id: job for job in jobs}
        # In flight before they are sent, because a failed attempt may have sent them.
        self.in_flight.update({job.id: job.ref for job in jobs})
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


class ItemOptions(TypedDict, total=False):
    """Options of `map` and `as_completed`.

    Attributes:
        keywords: Keyword arguments of all jobs.
        per_job: Number of items in one message. Workers form batches of items, whatever messages
            they came in; larger messages mean less work for all but the device.
        window: Maximum number of items in flight.
        timeout_s: Give up when no result has come for so long, in seconds; by default never. It
            bounds sending, waiting and cleaning up together.
        keeps_base64: Whether vectors of embeddings stay float32 in base64 where they came so, for
            `to_numpy`, instead of lists of floats.
    """

    keywords: Mapping[str, Any] | None
    per_job: int | None
    window: int
    timeout_s: float | None
    keeps_base64: bool


class ItemRun:
    """Items go through a window as jobs, and their outcomes come back."""

    def __init__(
        self,
        app: Celery,
        task: str,
        options: Mapping[str, Any],
        items: Iterable[Any],
        *,
        ordered: bool,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
        keeps_base64: bool = False,
    ) -> None:
        """Prepares; `options` are those of a `Publisher`, all others those of `ItemOptions`.

        Raises:
            BatchArgumentError: A number is out of range.
        """
        self._per_job = check_per_job(per_job)
        self._keeps_base64 = keeps_base64
        self._rest = iter(items)
        #: Those that were read and are in no job.
        self._items: list[Any] = []
        self._is_input_over = False
        #: Why reading the items ended before its time; raised in the end.
        self._error: Exception | None = None
        self._taken = 0
        self._ordered = ordered
        #: Outcomes of jobs that wait for those of older ones, by the index of the first, and the
        #: index of the next one.
        self._held: dict[int, Sequence[Outcome]] = {}
        self._next = 0
        # One for all: once Redis stays away, nothing else waits for it, and nothing can be revoked.
        retries = RetryPolicy.within(timeout_s)
        self._backend = app.backend
        self._broker = BrokerConnection(app, retries, persistent=True)
        sending = {"wait_s": timeout_s, **options, "keywords": keywords}
        self._stream = Stream[range](
            Collector(app, retries),
            Publisher(app, task, broker=self._broker, **sending),
            max(window // (self._per_job or 1), 1),
            timeout_s=timeout_s,
            explain=partial(explain_stall, app, task, options),
        )

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Sends jobs, and yields outcomes; raises as `TaskClient.as_completed`."""
        with closing(self):
            while self._items or self._stream.in_flight or not self._is_input_over:
                room = self._stream.room(len(self._held))
                self._read(room * (self._per_job or 1))
                jobs = self._make_jobs(room)
                has_room = room > len(jobs) and not self._is_input_over
                for task_id, indexes, answer in self._stream.step(jobs, has_room=has_room):
                    self._stream.discarded.append(task_id)
                    yield from self._release(indexes, answer)
                if self._stream.flush_is_due:
                    self._stream.flush()
            if self._error is not None:
                raise self._error

    def _read(self, count: int) -> None:
        """Reads items until there are so many; of a slow input, what comes soon."""
        end_s = time.monotonic() + SLOW_INPUT_S
        try:
            while len(self._items) < count and not self._is_input_over:
                self._items.append(next(self._rest))
                if time.monotonic() >= end_s:
                    return
        except StopIteration:
            self._is_input_over = True
        except Exception as error:  # noqa: BLE001 (raised after the other outcomes)
            self._error, self._is_input_over = error, True

    def _make_jobs(self, maximum: int) -> Sequence[NewJob[range]]:
        """Jobs of the items that were read; only the last one of all may be smaller."""
        size, count = self._per_job or 1, len(self._items)
        whole = count if self._is_input_over else count // size * size
        count = min(maximum * size, whole)
        starts, jobs = range(0, count, size), []
        for task_id, start in zip(uuids(len(starts)), starts, strict=True):
            part = self._items[start : min(start + size, count)]
            indexes = range(self._taken, self._taken + len(part))
            self._taken = indexes.stop
            item, item_count = (part, len(part)) if self._per_job else (part[0], 0)
            jobs.append(NewJob(task_id, item, item_count, indexes))
        del self._items[:count]
        return jobs

    def _release(self, indexes: range, answer: Answer) -> Iterator[Outcome]:
        """Outcomes of a job, or of none or several if they come in order."""
        form = self._per_job > 0, self._backend
        self._held[indexes.start] = read_outcomes(
            answer, indexes, *form, keeps_base64=self._keeps_base64
        )
        first = self._next if self._ordered else indexes.start
        while first in self._held:
            outcomes = self._held.pop(first)
            self._next = first = first + len(outcomes)
            yield from outcomes

    def close(self) -> None:
        """Revokes jobs that were not begun, and leaves nothing else behind in Redis."""
        if not self._broker.retries.is_spent:
            with suppress(BatcheryError, OSError):
                self._stream.flush()
                self._broker.revoke(self._stream.sent)
        self._stream.collector.close()
        self._broker.close()
