"""Sweeping: jobs in flight are looked at again and again, at a pace, oldest first."""

import time
from collections.abc import Iterable, Iterator, Sequence

from batchery_producer.answer import Answer
from batchery_producer.pace import Pace

#: Jobs that one sweep looks at; the next one goes on where it ended.
SWEEP_JOBS = 4096


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
