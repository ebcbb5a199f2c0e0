"""Sweeping: jobs in flight are looked at again and again, at a pace, oldest first."""

import time
from collections.abc import Iterable, Iterator, Sequence

from batchery_producer.results.answers import Answer

#: Shortest and longest pause between two sweeps, in seconds: what one job alone waits for its
#: result at most, and how often a display has something new to show.
SHORTEST_PAUSE_S = 0.002

LONGEST_PAUSE_S = 0.25

#: Part of the jobs in flight that should end between two sweeps. Less costs more sweeps per result;
#: more lets the queue run dry before the window is filled again.
SHARE_PER_SWEEP = 1 / 8

#: How much longer a pause is than the sweep before it, at least, where results are announced:
#: sweeps are there for the few that are not.
REST_PER_SWEEP = 9.0

#: Longest pause, in seconds, whatever a sweep takes: it includes what is done with its results.
LONGEST_REST_S = 2.0

#: Jobs that one sweep looks at; the next one goes on where it ended.
SWEEP_JOBS = 4096


class Pace:
    """How long to wait between two sweeps: long enough to find many results, never idle long.

    The time between sweeps follows the rate at which they find results. While they find none the
    pauses grow.
    """

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S
        self._rate: float | None = None

    def pause_s(
        self, *, in_flight: int, found: int, announced: int, since_s: float, sweep_s: float
    ) -> float:
        """How long to wait after a sweep, in seconds.

        Args:
            in_flight: Jobs that are still awaited.
            found: Results that the sweep found.
            announced: Results that came otherwise since the sweep before.
            since_s: Time since the sweep before, in seconds.
            sweep_s: What this one took: at most half of the time is spent asking.
        """
        if found:
            rate = found / max(since_s, SHORTEST_PAUSE_S)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._pause_s = in_flight * SHARE_PER_SWEEP / self._rate
        elif announced:
            self._pause_s = LONGEST_PAUSE_S
        else:
            self._pause_s *= 1.5
        self._pause_s = min(max(self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        rests = announced and announced >= found
        rest_s = min(sweep_s * (REST_PER_SWEEP if rests else 1.0), LONGEST_REST_S)
        return max(self._pause_s, rest_s)


class Sweeping:
    """What all collectors do; a subclass asks the backend, and may hear announcements."""

    def __init__(self) -> None:
        #: Oldest first.
        self._awaited: dict[str, None] = {}
        self._pace = Pace()
        self._swept_s = self._sweep_at_s = time.monotonic()
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
        if self._awaited and now_s >= self._sweep_at_s:
            found = 0
            for ended in self._sweep_some():
                found += 1
                yield ended
            self._plan_sweep(now_s, found)
            if found:
                wait_s = 0
        left_s = self._sweep_at_s - time.monotonic() if self._awaited else wait_s
        for ended in self._announcements(max(0.0, min(wait_s, left_s))):
            self._announced += 1
            yield ended

    def sweep(self) -> Iterator[tuple[str, Answer]]:
        """As `Collector.sweep`."""
        yield from self._ended(list(self._awaited))

    def _sweep_some(self) -> Iterator[tuple[str, Answer]]:
        if not self._left:
            # Turned round: taken from the end, the oldest come first.
            self._left = list(self._awaited)[::-1]
        some = [self._left.pop() for _ in range(min(SWEEP_JOBS, len(self._left)))]
        yield from self._ended([task_id for task_id in some if task_id in self._awaited])

    def _plan_sweep(self, began_s: float, found: int) -> None:
        now_s = time.monotonic()
        pause_s = self._pace.pause_s(
            in_flight=len(self._awaited),
            found=found,
            announced=self._announced,
            since_s=began_s - self._swept_s,
            sweep_s=now_s - began_s,
        )
        self._announced = 0
        self._swept_s, self._sweep_at_s = began_s, now_s + pause_s

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
