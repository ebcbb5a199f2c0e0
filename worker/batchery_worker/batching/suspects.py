"""Jobs that may have killed a device: they run before all others, and alone."""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Generic

from batchery_worker.job import Batch, Job, T


class Suspects(Generic[T]):
    """The suspects that wait, in the order in which they run."""

    def __init__(self) -> None:
        self._waiting: deque[Job[T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Job[T]]:
        return iter(self._waiting)

    def add(self, job: Job[T]) -> None:
        """Takes one in."""
        self._waiting.append(job)

    def remove(self, gone: Collection[int]) -> None:
        """Forgets the jobs whose `id` is among these."""
        self._waiting = deque(job for job in self._waiting if id(job) not in gone)

    def take(self, in_flight: int, cohort: int, *, in_slots: bool) -> Batch[T] | None:
        """Takes the next ones out, if the device may begin them now.

        Args:
            in_flight: Batches that the device holds.
            cohort: Maximum number of suspects that may share its slots, where it runs some.
            in_slots: Whether each job is a batch, and has slots of its own.
        """
        if not self._waiting:
            return None
        first = self._waiting[0]
        joins = in_slots and in_flight < min(cohort, first.among)
        if in_flight and not joins:
            return None
        if not in_slots:
            return self._take_group()
        self._waiting.popleft()
        return Batch((first,), alone=first.among == 1, cohort=first.among)

    def _take_group(self) -> Batch[T]:
        waiting = self._waiting
        jobs = [waiting.popleft()]
        items = jobs[0].items
        while (
            waiting
            and waiting[0].key == jobs[0].key
            and len(jobs) < min(jobs[0].among, waiting[0].among)
            and items + waiting[0].items <= jobs[0].limits.max_batch_size
        ):
            items += waiting[0].items
            jobs.append(waiting.popleft())
        return Batch(tuple(jobs), alone=len(jobs) == 1)
