"""Which jobs, when: pure policy. Time is an argument, devices are numbers, nothing here waits.

The rules, in the order in which they are asked:

1. Suspects go first, one at a time, alone on an empty device: only then can a death be blamed. A
   suspect that may have killed a whole worker has this worker to itself, with all its devices.
2. An idle device takes what is there at once, unless `max_wait_ms` asks it to let the batch grow.
3. A busy device takes a second batch only when that batch is full. Until then the batch keeps
   growing. Nothing is lost by waiting, because the device would only put the batch aside.
4. Batch keys take turns. A key that was passed over because its batch was still growing goes next,
   full or not, so that a busy neighbour cannot starve it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic

from batchery_worker.job import DEVICE_DEPTH, Batch, BatchKey, Job, Limits, T


@dataclass(slots=True)
class _KeyQueue(Generic[T]):
    """The waiting jobs of one key, oldest first."""

    jobs: deque[Job[T]] = field(default_factory=deque)
    items: int = 0
    passed_over: bool = False

    @property
    def limits(self) -> Limits:
        return self.jobs[0].limits

    @property
    def full(self) -> bool:
        return self.items >= self.limits.max_batch_size

    @property
    def due_s(self) -> float:
        """When an idle device stops waiting for more."""
        return self.jobs[0].arrived_s + self.limits.max_wait_s


class Scheduler(Generic[T]):
    """Holds the jobs that wait in the worker and forms their batches as late as possible."""

    def __init__(self) -> None:
        self._queues: OrderedDict[BatchKey, _KeyQueue[T]] = OrderedDict()
        self._suspects: deque[Job[T]] = deque()
        #: Suspects of an earlier worker: they were not started here.
        self._recovered: deque[Job[T]] = deque()

    def __len__(self) -> int:
        """How many jobs wait, suspects included."""
        in_queues = sum(len(waiting.jobs) for waiting in self._queues.values())
        return in_queues + len(self._suspects) + len(self._recovered)

    def __iter__(self) -> Iterator[Job[T]]:
        yield from self._suspects
        yield from self._recovered
        for waiting in self._queues.values():
            yield from waiting.jobs

    def admit(self, job: Job[T]) -> None:
        """Takes a job in; it waits behind those of its key that came before."""
        waiting = self._queues.setdefault(job.key, _KeyQueue())
        waiting.jobs.append(job)
        waiting.items += job.items

    def quarantine(self, job: Job[T]) -> None:
        """Takes back a job that was on a device which died; it will run alone."""
        self._suspects.append(job)

    def quarantine_recovered(self, job: Job[T]) -> None:
        """Takes in a job that was on a device when an earlier worker died; it will run alone."""
        self._recovered.append(job)

    def clear(self) -> list[Job[T]]:
        """Forgets every job that waits but was never started; returns them.

        Suspects stay: they were started, and the broker's messages are still theirs.
        """
        dropped = [*self.held(), *self._recovered]
        self._queues.clear()
        self._recovered.clear()
        return dropped

    def held(self) -> list[Job[T]]:
        """Every job that waits, was never started, and could as well wait elsewhere."""
        return [job for waiting in self._queues.values() for job in waiting.jobs]

    @property
    def oldest_held_s(self) -> float | None:
        """When the oldest of the jobs came that `held` returns; None if there is none."""
        return min((waiting.jobs[0].arrived_s for waiting in self._queues.values()), default=None)

    @property
    def has_suspects(self) -> bool:
        """Whether a job waits that must run alone."""
        return bool(self._suspects or self._recovered)

    def remove(self, jobs: Iterable[Job[T]]) -> None:
        """Forgets jobs that went to another worker."""
        # Two messages may have the same id.
        gone = set(map(id, jobs))
        for key, waiting in list(self._queues.items()):
            waiting.jobs = deque(job for job in waiting.jobs if id(job) not in gone)
            waiting.items = sum(job.items for job in waiting.jobs)
            if not waiting.jobs:
                del self._queues[key]

    def next_batch(
        self, in_flight: int, alone: bool, now_s: float, elsewhere: int = 0
    ) -> Batch[T] | None:
        """The batch that a device should get now.

        Args:
            in_flight: Batches that the device holds already, 0 to `DEVICE_DEPTH`.
            alone: Whether one of them is a suspect, beside which nothing may run.
            now_s: The time, on the clock of `Job.arrived_s`.
            elsewhere: Batches that the worker's other devices hold.

        Returns:
            A batch, whose jobs no longer wait here; or None if the device should get nothing now.
        """
        if alone or in_flight >= DEVICE_DEPTH:
            return None
        suspects = self._suspects or self._recovered
        if suspects:
            if in_flight or (elsewhere and suspects[0].recovered):
                return None
            return Batch((suspects.popleft(),), alone=True)
        skipped: list[_KeyQueue[T]] = []
        for key, waiting in self._queues.items():
            due = now_s >= waiting.due_s
            if waiting.full or (due and (in_flight == 0 or waiting.passed_over)):
                for each in skipped:
                    each.passed_over = True
                return self._take(key, waiting)
            if due:
                skipped.append(waiting)
        return None

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened; None for never."""
        return min((waiting.due_s for waiting in self._queues.values()), default=None)

    def _take(self, key: BatchKey, waiting: _KeyQueue[T]) -> Batch[T]:
        limit = waiting.limits.max_batch_size
        jobs = [waiting.jobs.popleft()]
        items = jobs[0].items
        while waiting.jobs and items + waiting.jobs[0].items <= limit:
            items += waiting.jobs[0].items
            jobs.append(waiting.jobs.popleft())
        waiting.items -= items
        waiting.passed_over = False
        if waiting.jobs:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return Batch(tuple(jobs))
