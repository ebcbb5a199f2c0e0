"""The seam between computing a batch and storing its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class Verdict(StrEnum):
    """What became of one job at the commit."""

    #: Result, notification and acknowledgement are in Redis; nothing is left to do but to tell.
    COMMITTED = "committed"
    #: The lease was no longer ours; another worker has the job.
    FENCED = "fenced"
    #: Celery's tracer completes it, in the main process.
    NEEDS_TRACER = "needs tracer"


@dataclass(frozen=True, slots=True)
class Settled:
    """A job with its outcome."""

    task_id: str
    outcome: Any


class Committer(Protocol):
    """Stores the results of a batch; called on the commit thread of a device process."""

    def commit(self, batch: Sequence[Settled]) -> Sequence[Verdict]:
        """Stores what it can; returns one verdict per job, in order."""
        ...


class TracerCommitter:
    """Leaves every job to Celery's tracer, which knows every feature of every backend."""

    def commit(self, batch: Sequence[Settled]) -> Sequence[Verdict]:
        """Returns `NEEDS_TRACER` for every job."""
        return [Verdict.NEEDS_TRACER for _ in batch]
