"""Jobs and batches as the scheduler sees them: plain values."""

from dataclasses import dataclass
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

#: Soft and hard time limit of a job, in seconds; None for no limit.
TimeLimits = tuple[float | None, float | None]

#: Maximum number of batches that a device holds: one runs, the next one is prepared. A third would
#: only wait there, where it can neither grow nor go to another device.
DEVICE_DEPTH = 2


class Lane(NamedTuple):
    """For whom a job runs: jobs of different lanes share the devices, by the shares of classes."""

    priority_class: str = "high"
    #: Tenants of one class have equal shares of it.
    tenant: str = ""
    #: Whether its jobs have many items; those with few must not wait behind them.
    is_large: bool = False


#: The lane of jobs that say nothing.
USUAL_LANE = Lane()


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The values that jobs must share to be in one batch."""

    task: str
    #: The keyword arguments, as canonical JSON.
    keywords: str = ""
    time_limits: TimeLimits = (None, None)
    #: Number of the shard with their leases: one commit ends those of one shard.
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the batches of one task."""

    #: Maximum number of items in a batch; a job with more items is a batch of its own.
    max_batch_size: int
    #: How long an idle device waits for a batch to fill, in seconds from its oldest job's arrival.
    max_wait_s: float = 0.0
    #: How long jobs may take from their arrival to their answer, in seconds; None for no target.
    target_s: float | None = None


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """One message, as the scheduler sees it."""

    id: str
    key: BatchKey
    limits: Limits
    #: Number of items that the job carries, at least 1.
    items: int
    #: When the worker received it, in seconds of a monotonic clock.
    arrived_s: float
    #: Whatever the pool needs to run and settle it.
    payload: T
    lane: Lane = USUAL_LANE
    #: When it should be answered, on the same clock.
    deadline_s: float = inf
    #: Number of devices and workers that died while they ran only this job.
    deaths: int = 0
    #: Whether the job was on a device when an earlier worker died.
    recovered: bool = False
    #: Maximum number of such jobs in its next batch, or in slots: half of those that were on that
    #: device.
    among: int = 1
    #: How long it had waited before it came, in seconds, as far as its message says; since its ETA,
    #: if it has one.
    waited_s: float = 0.0

    @property
    def sent_s(self) -> float:
        """Since when it waits, on the clock of `arrived_s`, as far as is known."""
        return self.arrived_s - self.waited_s


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Jobs that go to a device together; never empty, all of one key."""

    jobs: tuple[Job[T], ...]
    #: Whether it has its device to itself, so that its only job can be blamed for a death.
    alone: bool = False
    #: What lanes were charged for it, by `batching/shares.py`; nothing for suspects.
    charges: tuple[Any, ...] = ()
    #: Of a suspect in slots: maximum number of jobs on its device, all of them suspects; else 0.
    cohort: int = 0

    def __str__(self) -> str:
        first, others = self.jobs[0], len(self.jobs) - 1
        return f"{first.key.task}[{first.id}]" + (f" and {others} of its batch" if others else "")

    @property
    def items(self) -> int:
        """Number of items of all jobs together."""
        return sum(job.items for job in self.jobs)
