"""A batcher of fixed size and timeout, to compare the scheduler with. Pure.

It keeps jobs in the order in which they came, and gives a batch only to an idle device. It learns
one size of a task for all devices. Jobs that were on a device which died run alone, as in the
worker. Others of its kind are in the benchmarks.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from batchery_worker.job import Batch, BatchKey
from batchery_worker.simulator.policy import Policy, SimulatedBatch, SimulatedJob


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


class NeverUrgent(Policy):
    """What all rivals have in common: nothing goes between the passes of a batch."""

    takes_urgent = False

    def urgent_batch(
        self, behind: Sequence[SimulatedBatch], now_s: float, left_s: float
    ) -> SimulatedBatch | None:
        """Never one."""
        return None

    def expected_s(self, batch: SimulatedBatch) -> float:
        """Not known."""
        return math.inf


class Rival(NeverUrgent):
    """What all rivals share: queues by key, in the order of their oldest jobs."""

    def __init__(self, max_batch_size: int) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Maximum number of items in a batch.
        """
        self.max_batch_size = max_batch_size
        self._queues: dict[BatchKey, KeyQueue] = {}
        self._suspects: deque[SimulatedJob] = deque()
        self._shed: list[SimulatedJob] = []
        #: When a batch left, by its identity: results do not say it.
        self._sent_s: dict[int, float] = {}

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._suspects) + sum(map(len, self._queues.values()))

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        queue = self._queues.get(job.key)
        if queue is None:
            queue = self._queues[job.key] = KeyQueue()
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
        """The batch that a device should get now; None unless it is idle."""
        self.give_up(in_flight, now_s)
        if in_flight:
            return None
        if self._suspects:
            batch = Batch((self._suspects.popleft(),), alone=True)
        else:
            due = [
                (queue.oldest_s, key)
                for key, queue in self._queues.items()
                if queue and (queue.items >= self.size or now_s >= self.due_s(queue))
            ]
            if not due:
                return None
            _, key = min(due, key=lambda each: each[0])
            batch = Batch(tuple(self.take(self._queues[key])))
        self._sent_s[id(batch)] = now_s
        return batch

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for the time if its device died."""
        sent_s = self._sent_s.pop(id(batch))
        if run_s is not None and not batch.alone:
            self.learn(batch, sent_s, run_s)

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""
        due_s = (self.due_s(queue) for queue in self._queues.values() if queue)
        return min(due_s, default=None)

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that were given up since the last call."""
        shed, self._shed = self._shed, []
        return shed

    @property
    def oldest_s(self) -> float:
        """When the oldest waiting job came; suspects go before all others. There must be one."""
        if self._suspects:
            return -math.inf
        return min(queue.oldest_s for queue in self._queues.values() if queue)

    @property
    def size(self) -> int:
        """Items at which a batch waits no longer, and its maximum."""
        return self.max_batch_size

    def due_s(self, queue: KeyQueue) -> float:
        """When a batch leaves that has fewer items: by default, at once.

        Args:
            queue: Not empty.
        """
        return queue.oldest_s

    def take(self, queue: KeyQueue) -> Sequence[SimulatedJob]:
        """The jobs of the next batch, which leave their queue."""
        return queue.take(self.size)

    def give_up(self, in_flight: int, now_s: float) -> None:
        """Gives up jobs that would be too late: by default, none."""

    def learn(self, batch: SimulatedBatch, sent_s: float, run_s: float) -> None:
        """Learns from a batch that is back: by default, nothing."""


class FixedRival(Rival):
    """Fixed size and timeout.

    A batch leaves when it is full or when its oldest job has waited so long, even while a device is
    idle. So do the dynamic batchers of NVIDIA's Triton (`max_queue_delay_microseconds`) and of
    TorchServe (`batch_size`, `max_batch_delay`).
    """

    def __init__(self, max_batch_size: int, timeout_s: float) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Maximum number of items in a batch.
            timeout_s: How long its oldest job waits for others.
        """
        super().__init__(max_batch_size)
        self._timeout_s = timeout_s

    def due_s(self, queue: KeyQueue) -> float:
        """A fixed time after its oldest job."""
        return queue.oldest_s + self._timeout_s


class RivalByTask(NeverUrgent):
    """One rival for each task, as each of them has its own model, queue and costs."""

    def __init__(self, make: Callable[[], Rival]) -> None:
        """Holds no jobs; `make` makes the rival of a task."""
        self._make = make
        self._rivals: dict[str, Rival] = {}

    def __len__(self) -> int:
        """How many jobs wait."""
        return sum(map(len, self._rivals.values()))

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        rival = self._rivals.get(job.key.task)
        if rival is None:
            rival = self._rivals[job.key.task] = self._make()
        rival.admit(job)

    def quarantine(self, job: SimulatedJob) -> None:
        """Takes back a job that was on a device which died; it runs alone."""
        self._rivals[job.key.task].quarantine(job)

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
    ) -> SimulatedBatch | None:
        """The batch of the task whose job has waited longest, among those that give one."""
        waiting = [rival for rival in self._rivals.values() if len(rival)]
        waiting.sort(key=lambda rival: rival.oldest_s)
        batches = (rival.next_batch(in_flight, alone, now_s) for rival in waiting)
        return next((batch for batch in batches if batch is not None), None)

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for the time if its device died."""
        self._rivals[batch.jobs[0].key.task].ended(batch, run_s)

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""
        times_s = (rival.wake_s() for rival in self._rivals.values())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that were given up since the last call."""
        return [job for rival in self._rivals.values() for job in rival.take_late(now_s)]
