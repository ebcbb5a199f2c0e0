"""Polling: the collector asks again and again for jobs in flight, oldest first."""

import time
from collections.abc import Iterable, Iterator, Sequence

from batchery_producer.results.answers import Answer

#: Limits of the interval between two polls, in seconds: the delay of a single job's result, and how
#: often a display has something new to show.
MIN_INTERVAL_S = 0.002

MAX_INTERVAL_S = 0.25

#: Part of the jobs in flight that should end between two polls. A smaller part costs more polls per
#: result; a larger one lets the queue run empty before the window is filled again.
SHARE_PER_POLL = 1 / 8

#: Minimum ratio of the interval to the duration of the poll, if workers announce results: polls
#: then find only the few results that are not announced.
REST_PER_POLL = 9.0

#: Maximum interval that follows from the duration of a poll, in seconds. The duration includes the
#: caller's work on the results.
MAX_REST_S = 2.0

#: Number of jobs that one poll asks for; the next poll continues there.
POLL_JOBS = 4096


class PollingInterval:
    """How long to wait between two polls, to find many results and yet find them soon.

    The interval follows from the rate at which polls find results, and grows while they find none.
    """

    def __init__(self) -> None:
        self._interval_s = MIN_INTERVAL_S
        self._rate: float | None = None

    def next_s(
        self, *, in_flight: int, found: int, announced: int, since_s: float, poll_s: float
    ) -> float:
        """How long to wait after a poll, in seconds.

        Args:
            in_flight: Number of jobs that are still awaited.
            found: Number of results that the poll found.
            announced: Number of results that were announced since the previous poll.
            since_s: Time since the previous poll, in seconds.
            poll_s: Duration of this poll, in seconds; polling takes half of the time or less.
        """
        if found:
            rate = found / max(since_s, MIN_INTERVAL_S)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._interval_s = in_flight * SHARE_PER_POLL / self._rate
        elif announced:
            self._interval_s = MAX_INTERVAL_S
        else:
            self._interval_s *= 1.5
        self._interval_s = min(max(self._interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        is_announced = announced and announced >= found
        rest_s = min(poll_s * (REST_PER_POLL if is_announced else 1.0), MAX_REST_S)
        return max(self._interval_s, rest_s)


class PollingCollector:
    """Base of all collectors; a subclass asks the backend, and may receive announcements."""

    def __init__(self) -> None:
        #: Oldest first.
        self._awaited: dict[str, None] = {}
        self._interval = PollingInterval()
        self._polled_s = self._poll_at_s = time.monotonic()
        self._announced = 0
        self._left: list[str] = []

    def expect(self, task_ids: Iterable[str]) -> None:
        """As `Collector.expect`."""
        self._awaited.update(dict.fromkeys(task_ids))

    def drop(self, task_ids: Iterable[str]) -> None:
        """As `Collector.drop`."""
        for task_id in task_ids:
            self._awaited.pop(task_id, None)

    def collect(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        """As `Collector.collect`."""
        now_s = time.monotonic()
        if self._awaited and now_s >= self._poll_at_s:
            found = 0
            for ended in self._poll_some():
                found += 1
                yield ended
            self._plan_poll(now_s, found)
            if found:
                wait_s = 0
        left_s = self._poll_at_s - time.monotonic() if self._awaited else wait_s
        for ended in self._announcements(max(0.0, min(wait_s, left_s))):
            self._announced += 1
            yield ended

    def poll_all(self) -> Iterator[tuple[str, Answer]]:
        """As `Collector.poll_all`."""
        yield from self._ended(list(self._awaited))

    def _poll_some(self) -> Iterator[tuple[str, Answer]]:
        if not self._left:
            # Reversed, as jobs are taken from the end and the oldest must come first.
            self._left = list(self._awaited)[::-1]
        some = [self._left.pop() for _ in range(min(POLL_JOBS, len(self._left)))]
        yield from self._ended([task_id for task_id in some if task_id in self._awaited])

    def _plan_poll(self, began_s: float, found: int) -> None:
        now_s = time.monotonic()
        next_s = self._interval.next_s(
            in_flight=len(self._awaited),
            found=found,
            announced=self._announced,
            since_s=began_s - self._polled_s,
            poll_s=now_s - began_s,
        )
        self._announced = 0
        self._polled_s, self._poll_at_s = began_s, now_s + next_s

    def _ended(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for task_id, answer in self._answers(task_ids):
            if task_id in self._awaited:
                self._awaited.pop(task_id, None)
                yield task_id, answer

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        raise NotImplementedError

    def _announcements(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        time.sleep(wait_s)
        return iter(())
