"""What decides in the simulator: the worker's own scheduler, or a fixed batcher. Pure."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.batching.shares import SharesByTask
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

    def progress(self, batch: SimulatedBatch, had_s: float, slots: int) -> None:
        """Notes how long a job had its slot since the last call, and how many it has now."""

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


class SlotScheduler(RealScheduler):
    """The same for a device with slots, which all tasks share here."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        super().__init__(shares)
        self._shares = SharesByTask(shares, self.costs, in_slots=True)


class KeyQueue:
    """The waiting jobs of one key, oldest first."""

    def __init__(self) -> None:
        self.jobs: deque[SimulatedJob] = deque()
        self.items = 0

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self.jobs)

    @property
    def oldest_s(self) -> float:
        """When the oldest job came; there must be one."""
        return self.jobs[0].arrived_s

    def append(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        self.jobs.append(job)
        self.items += job.items

    def take(self, max_items: int, *, at_least_one: bool = True) -> list[SimulatedJob]:
        """Gives out the oldest jobs: up to so many items, but perhaps at least one job."""
        jobs = self.jobs
        taken: list[SimulatedJob] = []
        items = 0
        while jobs and (items + jobs[0].items <= max_items or (at_least_one and not taken)):
            items += jobs[0].items
            taken.append(jobs.popleft())
        self.items -= items
        return taken


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
        self.max_batch_size = max_batch_size
        self._timeout_s = timeout_s
        self._queues: dict[BatchKey, KeyQueue] = {}
        self._suspects: deque[SimulatedJob] = deque()

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._suspects) + sum(map(len, self._queues.values()))

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        queue = self._queues.get(job.key)
        if queue is None:
            queue = self._queues[job.key] = self.make_queue()
        queue.append(job)

    def quarantine(self, job: SimulatedJob) -> None:
        """Takes back a job that was on a device which died; it runs alone."""
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
            (queue.oldest_s, key)
            for key, queue in self._queues.items()
            if queue and (queue.items >= self.size or now_s >= self.due_s(queue))
        ]
        if not due:
            return None
        _, key = min(due, key=lambda each: each[0])
        return Batch(tuple(self.take(self._queues[key])))

    def progress(self, batch: SimulatedBatch, had_s: float, slots: int) -> None:
        """Charges nobody."""

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Learns nothing."""

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""
        due_s = (self.due_s(queue) for queue in self._queues.values() if queue)
        return min(due_s, default=None)

    # What other batchers do in another way

    @property
    def size(self) -> int:
        """Items at which a batch waits no longer, and its maximum."""
        return self.max_batch_size

    def make_queue(self) -> KeyQueue:
        """A queue for the jobs of one more key."""
        return KeyQueue()

    def due_s(self, queue: KeyQueue) -> float:
        """When a batch leaves that has fewer items: a fixed time after its oldest job.

        Args:
            queue: Not empty.
        """
        return queue.oldest_s + self._timeout_s

    def take(self, queue: KeyQueue) -> Sequence[SimulatedJob]:
        """The jobs of the next batch, which leave their queue."""
        return queue.take(self.size)
