"""A stream of items through a task: some in flight, outcomes as they come or in order."""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from celery import Celery

from batchery.errors import BatcheryError, NoResult
from batchery_producer.diagnosis import Silence, explain_silence
from batchery_producer.publishing.connection import Outlet
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.publishing.template import uuids
from batchery_producer.results.answers import Outcome, header_of, outcomes_of
from batchery_producer.results.collector import Collector, collector_for
from batchery_producer.retry import Patience

logger = logging.getLogger(__name__)

#: Items in flight: some batches for each of several devices, and still little memory.
WINDOW = 8192

#: Part of the window that must be free for jobs to be sent while others are in flight: a few jobs
#: cost as much as many.
SEND_SHARE = 1 / 8

#: Most jobs that are sent between two looks for results.
SEND_JOBS = 1000

#: How long it waits for results at a time, in seconds.
WAIT_S = 0.25

#: Results that are removed from the backend at a time.
FORGET = 1000


class Progress(NamedTuple):
    """How far a stream is, in items."""

    sent: int
    done: int
    failed: int


class Stream:
    """Iterate over it once. Closing it, or an exception, revokes the jobs that were not begun."""

    def __init__(
        self,
        app: Celery,
        task: str,
        items: Iterable[Any],
        *,
        keywords: Mapping[str, Any],
        options: Mapping[str, Any],
        per_job: int,
        window: int,
        ordered: bool,
        timeout_s: float | None,
        keep_results: bool,
        progress: Callable[[Progress], None],
    ) -> None:
        self._app = app
        self._task = task
        self._items = iter(items)
        self._is_packed = per_job > 0
        self._size = per_job or 1
        self._window = window
        self._ordered = ordered
        self._keep_results = keep_results
        self._progress = progress
        self._outlet = Outlet(app, Patience(), persistent=True)
        self._collector: Collector = collector_for(app, Patience())
        self._publisher = Publisher(app, task, keywords=keywords, outlet=self._outlet, **options)
        #: Task id -> indexes of its items.
        self._jobs: dict[str, range] = {}
        #: Outcomes that wait for those before them.
        self._early: dict[int, Outcome] = {}
        self._read: list[str] = []
        self._exhausted = False
        self._sent = self._done = self._failed = self._yielded = 0
        self._silence = Silence(self._why, logger.warning, timeout_s)

    def run(self) -> Generator[Outcome, None, None]:
        """Yields one outcome per item.

        Raises:
            NoResult: None came for as long as the timeout says.
            GaveUp: Redis stays away.
            EncodeError: kombu's, for an item that cannot be serialized.
        """
        self._silence.heard()
        try:
            while not (self._exhausted and not self._jobs):
                sent = self._send() if self._has_room else 0
                yield from self._receive(0.0 if sent else WAIT_S)
                self._progress(Progress(self._sent, self._done, self._failed))
                if self._jobs and (over := self._silence.check()):
                    raise NoResult(over)
        finally:
            self._end()

    @property
    def _room(self) -> int:
        """Items that may be sent, in whole jobs."""
        # In order, what waits for an outcome before it counts as well: memory is bounded.
        held = self._sent - (self._yielded if self._ordered else self._done)
        return (self._window - held) // self._size * self._size

    @property
    def _has_room(self) -> bool:
        """Whether it is worth while to send jobs."""
        least = min(self._window * SEND_SHARE, SEND_JOBS * self._size)
        room = self._room
        return not self._exhausted and room > 0 and (not self._jobs or room >= least)

    def _send(self) -> int:
        count = min(self._room, SEND_JOBS * self._size)
        items = list(islice(self._items, count))
        self._exhausted = len(items) < count
        whole = len(items) // self._size * self._size
        self._publish(items[:whole], self._size)
        self._publish(items[whole:], len(items) - whole)
        return len(items)

    def _publish(self, items: list[Any], size: int) -> None:
        """Sends jobs of so many items each."""
        if not items:
            return
        if not self._jobs:
            self._silence.heard()
        starts = range(0, len(items), size)
        ids = uuids(len(starts))
        jobs = {
            task_id: range(self._sent + start, self._sent + start + size)
            for task_id, start in zip(ids, starts, strict=True)
        }
        self._jobs |= jobs
        self._sent += len(items)
        self._collector.expect(ids)
        carried = [items[at : at + size] for at in starts] if self._is_packed else items
        headers = header_of(size if self._is_packed else 0, self._collector.headers)
        self._publisher.send(list(zip(ids, carried, strict=True)), headers)

    def _receive(self, wait_s: float) -> Iterator[Outcome]:
        for task_id, answer in self._collector.collect(wait_s):
            self._silence.heard()
            self._note_read(task_id)
            indexes = self._jobs.pop(task_id)
            for outcome in outcomes_of(answer, indexes, self._is_packed, self._app.backend):
                self._done += 1
                self._failed += outcome.error is not None
                yield from self._in_order(outcome)

    def _in_order(self, outcome: Outcome) -> Iterator[Outcome]:
        if not self._ordered:
            yield outcome
            return
        self._early[outcome.index] = outcome
        while self._yielded in self._early:
            self._yielded += 1
            yield self._early.pop(self._yielded - 1)

    def _note_read(self, task_id: str) -> None:
        if not self._keep_results:
            self._read.append(task_id)
            if len(self._read) >= FORGET:
                self._forget()

    def _forget(self) -> None:
        read, self._read = self._read, []
        self._collector.forget(read)

    def _why(self) -> str:
        return explain_silence(self._app, self._task, self._publisher.queue)

    def _end(self) -> None:
        with suppress(BatcheryError, OSError):
            self._forget()
            if self._jobs:
                self._outlet.revoke(list(self._jobs))
        self._collector.close()
        self._outlet.close()
