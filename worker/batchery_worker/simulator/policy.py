"""What decides in the simulator: the contract, and the worker's own scheduler behind it. Pure."""

import math
from collections.abc import Sequence
from typing import Protocol

from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, Job
from batchery_worker.simulator.workload import Arrival

SimulatedJob = Job[Arrival]
SimulatedBatch = Batch[Arrival]


class Policy(Protocol):
    """Which jobs are in the next batch, and when it leaves; the methods are the scheduler's."""

    #: Whether it has urgent batches.
    takes_urgent: bool

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

    def expected_s(self, batch: SimulatedBatch) -> float:
        """How long a batch will have its device; infinity if that is not known."""

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for `run_s` if its device died."""

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that are given up; they wait no longer."""


class RealScheduler(Scheduler[Arrival]):
    """The scheduler that a worker has."""

    takes_urgent = True

    def expected_s(self, batch: SimulatedBatch) -> float:
        """How long a batch will have its device; infinity if its task never ran."""
        task = batch.jobs[0].key.task
        return self.costs.expected_s(task, batch.items) if self.costs.knows(task) else math.inf
