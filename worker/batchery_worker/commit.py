"""The seam between computing a batch and storing its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from batchery_worker.terms import Terms


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
    """A job with its outcome, as `encode_outcome` spelled it."""

    task_id: str
    spelled: Sequence[Any]


class Committer(Protocol):
    """Stores the results of a batch; called on the commit thread of a device process."""

    def commit(
        self, jobs: Sequence[Settled], terms: Terms, facts: Mapping[str, Any]
    ) -> Sequence[Verdict]:
        """Stores what it can.

        Args:
            jobs: Of one batch.
            terms: Of the same batch: what the main process knows of it.
            facts: Of the same batch; stored with each result.

        Returns:
            One verdict per job, in order.
        """
        ...
