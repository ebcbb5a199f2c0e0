"""Jobs and batches as the scheduler sees them: plain values."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

#: Soft and hard time limit of a job, in seconds; None for no limit.
TimeLimits = tuple[float | None, float | None]

#: Maximum number of batches that a device holds: one runs, one is prepared meanwhile. More would
#: only wait there, where they can neither grow nor go to another device.
DEVICE_DEPTH = 2


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What jobs must have in common to share a batch."""

    task: str
    #: The keyword arguments, in a canonical spelling.
    keywords: str = ""
    time_limits: TimeLimits = (None, None)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large and how old a batch of one key may get."""

    #: Maximum number of items in a batch; a job that alone has more runs in a batch of its own.
    max_batch_size: int
    #: How long an idle device waits for the batch to fill, counted from its oldest job, in seconds.
    max_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """One message, as far as the scheduler is concerned."""

    id: str
    key: BatchKey
    limits: Limits
    #: Number of items that the job carries, at least 1.
    items: int
    #: When the worker received it, in seconds of a monotonic clock.
    arrived_s: float
    #: Whatever the pool needs to run and settle it.
    payload: T
    #: How often a device, or a worker, died while it ran this job and no other.
    deaths: int = 0
    #: Whether it was on a device when an earlier worker died.
    recovered: bool = False


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Jobs that go to a device together; never empty, all of one key."""

    jobs: tuple[Job[T], ...]
    #: Whether it runs with nothing else on its device, so that a death can be blamed on its only
    #: job.
    alone: bool = False

    @property
    def items(self) -> int:
        """Number of items of all jobs together."""
        return sum(job.items for job in self.jobs)
