"""The waiting jobs of one lane, in the order in which they are due: pure."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf
from typing import Generic

from batchery_worker.job import BatchKey, Job, Lane, T

#: A job counts as due so long after it came, in seconds, unless its deadline is earlier. So those
#: with deadlines go first, and can hold up the others for so long at most.
DUE_S = 60.0

_numbers = count()


@dataclass(slots=True, eq=False)
class Flow(Generic[T]):
    """The waiting jobs of one lane and one key: earliest deadline first, then as they came."""

    key: BatchKey
    lane: Lane
    #: Virtual time at which its next job begins.
    tag: float = 0.0
    #: Virtual time for which it was charged in batches that are not back.
    running: float = 0.0
    #: Number of those batches.
    batches: int = 0
    #: Whether it is not known from before, and had no batch yet.
    is_new: bool = False
    #: Number of items of its jobs.
    items: int = 0
    #: Jobs without an early deadline, as they came.
    _undated: deque[Job[T]] = field(default_factory=deque)
    #: A heap of jobs with an early deadline: deadline, number, job.
    _dated: list[tuple[float, int, Job[T]]] = field(default_factory=list)
    #: When the oldest of those came; None if that must be looked up.
    _oldest_dated_s: float | None = inf

    def __len__(self) -> int:
        """Number of its jobs."""
        return len(self._undated) + len(self._dated)

    def __iter__(self) -> Iterator[Job[T]]:
        return chain((job for _, _, job in self._dated), self._undated)

    @property
    def group(self) -> tuple[str, str]:
        """Task and tenant: flows that differ only in the rest of their keys are one group."""
        return self.key.task, self.lane.tenant

    @property
    def oldest_s(self) -> float:
        """When the oldest of its jobs came; it must have one."""
        if self._oldest_dated_s is None:
            self._oldest_dated_s = min((job.arrived_s for _, _, job in self._dated), default=inf)
        if not self._undated:
            return self._oldest_dated_s
        return min(self._undated[0].arrived_s, self._oldest_dated_s)

    def add(self, job: Job[T]) -> None:
        """Takes a job in."""
        self.items += job.items
        if job.deadline_s < job.arrived_s + DUE_S:
            heappush(self._dated, (job.deadline_s, next(_numbers), job))
            if self._oldest_dated_s is not None:
                self._oldest_dated_s = min(self._oldest_dated_s, job.arrived_s)
        else:
            self._undated.append(job)

    def first(self) -> Job[T]:
        """The job that is due first; there must be one."""
        return self._dated[0][2] if self._is_dated_first() else self._undated[0]

    def pop(self) -> Job[T]:
        """Takes the job out that is due first; there must be one."""
        if self._is_dated_first():
            job = heappop(self._dated)[2]
            if job.arrived_s == self._oldest_dated_s:
                self._oldest_dated_s = None
        else:
            job = self._undated.popleft()
        self.items -= job.items
        return job

    def take(self, is_wanted: Callable[[Job[T]], bool]) -> list[Job[T]]:
        """Takes out the jobs that are wanted."""
        taken = [job for job in self if is_wanted(job)]
        if taken:
            # Two messages may have the same id.
            gone = set(map(id, taken))
            self._undated = deque(job for job in self._undated if id(job) not in gone)
            self._dated = [entry for entry in self._dated if id(entry[2]) not in gone]
            heapify(self._dated)
            self._oldest_dated_s = None
            self.items -= sum(job.items for job in taken)
        return taken

    def _is_dated_first(self) -> bool:
        if not self._dated:
            return False
        return not self._undated or self._dated[0][0] < self._undated[0].arrived_s + DUE_S
