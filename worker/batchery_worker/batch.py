"""A batch on its way through a device: formed, prepared, run, committed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from batchery.task import BatchTask
from batchery.transport.lease_store import LeaseStore
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.job import Batch
from batchery_worker.result_cache import DedupedBatch
from batchery_worker.work import Work


class TextTimes(NamedTuple):
    """How long a text took."""

    #: From the arrival of its job at the device to its first token, in seconds.
    first_token_s: float
    #: Mean time between two tokens, in seconds; None for a text of one token.
    pause_s: float | None
    #: Tokens of the prompt and of the text; 0 where a server does not say.
    tokens_in: int
    tokens_out: int


class JobAnswer(NamedTuple):
    """What became of one job of a batch."""

    status: CommitStatus
    #: For Celery's tracer, or for what listens to a committed job; else None.
    outcome: Any = None
    #: Its text, for events and the log; None if nobody reads it.
    text: str | None = None
    #: Whether something listens to a committed job.
    is_listened: bool = False


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A batch on its way through the threads of a device."""

    task: BatchTask
    work: Work
    #: As the scheduler has formed it.
    formed: Batch[Any]
    formed_s: float = field(default_factory=monotonic)
    #: Has the leases of its jobs; None where there are none.
    store: LeaseStore | None = None
    #: Number of its note among the running batches in Redis.
    note: int = 0

    # In slots

    #: How many of its items have a slot, or will have one.
    items_left: int = 0
    #: Whether it made room for a job of a higher class, and waits for a slot.
    is_aside: bool = False
    #: Up to when its lane was charged for its slots; 0 before the first time.
    charged_s: float = 0.0

    # Prepared

    #: The items that have to be computed, prepared.
    items: Sequence[Any] = ()
    #: Its runner's own: what it is run with.
    served: Any = None
    #: Which items share a result; None if each item is computed.
    deduped: DedupedBatch | None = None
    prepare_ms: float = 0.0

    # Run

    #: When it began, and how long the load of its model took before that, in seconds.
    began_s: float | None = None
    load_s: float = 0.0
    #: When its last stage ended, on the clock of `time.perf_counter`.
    ended_s: float = 0.0
    #: One outcome per item, once it is computed.
    outcomes: Sequence[Any] = ()
    forward_ms: float = 0.0
    #: How long the process of its card computed for it; 0 where this one computes.
    computed_ms: float = 0.0
    #: Tokens of the items, and tokens that were computed; 0 if the task counts none.
    tokens: int = 0
    computed_tokens: int = 0
    #: That of its model; empty if it has none.
    version: str = ""
    #: How long it has waited for threads so far.
    queued_ms: float = 0.0
    #: Why it has no outcomes, if it is the job of slots that it had to leave.
    dropped: CommitStatus | None = None
    #: Of each text that a model with slots has written for it.
    texts: Sequence[TextTimes] = ()

    # Answered

    #: Facts that all its jobs share; each job's `waited_ms` is added later.
    info: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[JobAnswer] = ()
    commit_ms: float = 0.0
    #: Counts of how the items got their outcomes; None for a task without a cache.
    reused: Mapping[str, Any] | None = None
    #: Number of failed items of multi-item jobs, by class of the error.
    failed_items: Mapping[str, int] = field(default_factory=dict)

    @property
    def runs_since_s(self) -> float:
        """When it began; while it has not, when it was formed."""
        return self.formed_s if self.began_s is None else self.began_s
