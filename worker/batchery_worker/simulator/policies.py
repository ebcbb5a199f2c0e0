"""What decides in the simulator: the worker's own scheduler, or a fixed batcher. Pure."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, BatchKey, Job
from batchery_worker.simulator.workload import Arrival

SimulatedJob = Job[Arrival]
SimulatedBatch = Batch[Arrival]


class Policy(Protocol):
    """Which jobs are in the next batch, and when it leaves; the methods are the scheduler's.

    By default nothing goes between the passes of a batch, no job is given up, and nothing is known
    of how long a batch will take.
    """

    #: Whether it has urgent batches.
    takes_urgent: bool = False

    def __len__(self) -> int:
        """How many jobs wait."""

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""

    def quarantine(self, job: SimulatedJob) -> None:
        """Takes back a job that was on a device which died."""

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
    ) -> SimulatedBatch | None:
        """The batch that a device should get now.

        Args:
            in_flight: Batches that the device holds already.
            alone: Whether one of them is a suspect, next to which nothing may run.
            now_s: The time.
            elsewhere: Batches that all other devices hold.
            behind: The batches of `in_flight`, where the device takes urgent ones.
            left_s: How long the device has to do with those.
        """

    def urgent_batch(
        self, behind: Sequence[SimulatedBatch], now_s: float, left_s: float
    ) -> SimulatedBatch | None:
        """A batch that should run before the rest of what a device holds, for `left_s`."""
        return None

    def expected_s(self, batch: SimulatedBatch) -> float:
        """How long a batch will have its device; infinity if that is not known."""
        return math.inf

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for `run_s` if its device died."""

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that are given up; they wait no longer."""
        return []


class RealScheduler(Scheduler[Arrival]):
    """The scheduler that a worker has."""

    takes_urgent = True

    def expected_s(self, batch: SimulatedBatch) -> float:
        """How long a batch will have its device; infinity if its task never ran."""
        task = batch.jobs[0].key.task
        return self.costs.expected_s(task, batch.items) if self.costs.knows(task) else math.inf


class FixedBatcher(Policy):
    """Fixed size and timeout, to compare the scheduler with.

    A batch leaves when it is full or when its oldest job has waited so long, even while a device is
    idle; a busy one gets none. So do the dynamic batchers of NVIDIA's Triton
    (`max_queue_delay_microseconds`) and of TorchServe (`batch_size`, `max_batch_delay`). Jobs of a
    device that died run alone, as in the worker.
    """

    def __init__(self, max_batch_size: int, timeout_s: float) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Maximum number of items in a batch.
            timeout_s: How long its oldest job waits for others.
        """
        self._max_batch_size = max_batch_size
        self._timeout_s = timeout_s
        #: The waiting jobs of each key, oldest first, and the number of their items.
        self._queues: dict[BatchKey, deque[SimulatedJob]] = {}
        self._items: Counter[BatchKey] = Counter()
        self._suspects: deque[SimulatedJob] = deque()

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._suspects) + sum(map(len, self._queues.values()))

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        self._queues.setdefault(job.key, deque()).append(job)
        self._items[job.key] += job.items

    def quarantine(self, job: SimulatedJob) -> None:
        """Takes back a job that was on a device which died."""
        self._suspects.append(job)

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
    ) -> SimulatedBatch | None:
        """The due batch whose job has waited longest; none for a busy device."""
        if in_flight:
            return None
        if self._suspects:
            return Batch((self._suspects.popleft(),), alone=True)
        due = [
            (queue[0].arrived_s, key)
            for key, queue in self._queues.items()
            if queue
            and (
                self._items[key] >= self._max_batch_size
                or now_s >= queue[0].arrived_s + self._timeout_s
            )
        ]
        return self._take(min(due, key=lambda each: each[0])[1]) if due else None

    def _take(self, key: BatchKey) -> SimulatedBatch:
        queue = self._queues[key]
        jobs = [queue.popleft()]
        items = jobs[0].items
        while queue and items + queue[0].items <= self._max_batch_size:
            items += queue[0].items
            jobs.append(queue.popleft())
        self._items[key] -= items
        return Batch(tuple(jobs))

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Learns nothing."""

    def wake_s(self) -> float | None:
        """When the first batch is due that has fewer items than a full one."""
        return min(
            (queue[0].arrived_s + self._timeout_s for queue in self._queues.values() if queue),
            default=None,
        )
