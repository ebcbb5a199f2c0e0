"""Jobs that may have killed a device or a worker: they run before all others, and alone."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Generic

from batchery_worker.job import Batch, BatchKey, Job, T


class Suspects(Generic[T]):
    """The suspects that wait, in the order in which they run."""

    def __init__(self) -> None:
        #: Those that were on a device of this worker.
        self.own: deque[Job[T]] = deque()
        #: Those of an earlier worker: they were not started here.
        self.recovered: deque[Job[T]] = deque()

    def __len__(self) -> int:
        return len(self.own) + len(self.recovered)

    def __iter__(self) -> Iterator[Job[T]]:
        yield from self.own
        yield from self.recovered

    def find(self, serves: Callable[[BatchKey], bool]) -> Job[T] | None:
        """The one whose turn it is on a device that serves some keys."""
        # Those that may have killed a worker keep their order, as all devices wait for each.
        candidates = chain(self.own, islice(self.recovered, 1))
        return next((job for job in candidates if serves(job.key)), None)

    def remove(self, gone: Collection[int]) -> None:
        """Forgets the jobs whose `id` is among these."""
        self.own = deque(job for job in self.own if id(job) not in gone)
        self.recovered = deque(job for job in self.recovered if id(job) not in gone)

    def take(
        self, suspect: Job[T], task: str, in_flight: int, elsewhere: int, cohort: int
    ) -> Batch[T] | None:
        """Takes one out, if the device may begin it now.

        Args:
            suspect: Of `find`.
            task: As for `Scheduler.next_batch`, like the others.
            in_flight: Batches that the device holds.
            elsewhere: Those that the worker's other devices hold.
            cohort: Maximum number of suspects that may share its slots.
        """
        joins = bool(task) and in_flight < min(cohort, suspect.among)
        if (in_flight and not joins) or (elsewhere and suspect.recovered):
            return None
        is_first = bool(self.recovered) and self.recovered[0] is suspect
        if is_first and not task:
            return self._take_recovered()
        (self.recovered if is_first else self.own).remove(suspect)
        among = suspect.among if task else 1
        return Batch((suspect,), alone=among == 1, cohort=among if task else 0)

    def _take_recovered(self) -> Batch[T]:
        waiting = self.recovered
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
