"""What a device is to run: the jobs of a batch, their limits, and where their results go."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchery.protocol.headers import Form
from batchery.transport.lease_store import LeaseStore

#: The context of one job: token of its lease; how long it waited, in ms; further fields of the
#: stored result, None if no result is stored. None for a job that needs the tracer.
JobCommit = tuple[str, float, Mapping[str, Any] | None] | None


class CachePolicy(NamedTuple):
    """How a device caches the results of a task."""

    #: Version of the results: the option `cache` of the task.
    version: str
    #: How long a result is kept, in seconds.
    ttl_s: float


@dataclass(frozen=True, slots=True)
class CommitContext:
    """The context of a batch."""

    #: Has the leases of its jobs.
    store: LeaseStore
    jobs: Sequence[JobCommit]
    #: Maximum length of a result's text in events and the log, in characters; None if nobody reads
    #: it.
    text_chars: int | None = None
    #: Whether the main process needs the results, because something listens to successes.
    is_listened: bool = False
    #: Name of a completion stream -> index of each job that asks for it.
    completion_streams: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Index of a job -> how long its result is kept, in seconds; only of jobs that say it.
    keep_s: Mapping[int, int] = field(default_factory=dict)
    #: Index of each job whose producer reads packed vectors.
    packed: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class PieceContext:
    """How the partial results of a batch reach their readers."""

    #: Index of each job that is streamed -> token of its lease; empty if it has none.
    tokens: Mapping[int, str]
    #: Ids of those that may have run before.
    resumed: Sequence[str]
    #: Maximum number of pieces of a job that are kept.
    max_pieces: int
    #: How long a job goes on without a reader, in seconds.
    grace_s: float
    #: Has the leases of its jobs; None where there are none.
    store: LeaseStore | None = None


class SlotLimits(NamedTuple):
    """What ends a job in slots before its time, in seconds from its arrival on the device."""

    hard_s: float | None = None
    #: Until its deadline, where jobs are given up that cannot make theirs.
    deadline_s: float | None = None
    #: Until it expires.
    expires_s: float | None = None


NO_LIMITS = SlotLimits()


@dataclass(frozen=True, slots=True)
class Work:
    """A batch that a device is to run."""

    id: int
    task: str
    keywords: Mapping[str, Any]
    #: Of each job: task id, items, and whether it is a multi-item job, and of which form.
    jobs: Sequence[tuple[str, Sequence[Any], Form]]
    max_batch_size: int
    max_batch_tokens: int | None
    #: Limit of each call of the function, which may catch `SoftTimeLimitExceeded`.
    soft_time_limit_s: float | None = None
    #: The headers of each job's message; empty if neither the function sees them, nor the state
    #: STARTED is stored.
    contexts: Sequence[Mapping[str, Any]] = ()
    #: For the commit of the results; None if Celery's tracer must complete all jobs.
    commit: CommitContext | None = None
    #: None if nobody streams one of the jobs.
    pieces: PieceContext | None = None
    #: If the items of its only job run one by one, as it is a suspect: places of those that have
    #: ended a device, once for each time; None for any other batch.
    culprits: Sequence[int] | None = None
    #: None for a task without a cache.
    cache: CachePolicy | None = None
    #: Whether it goes before the rest of what the device holds, between two forward passes.
    urgent: bool = False
    #: Whether its time is limited, so that the device must say `ResultsWait`.
    is_timed: bool = False
    #: For a device with slots, where all batches have one job.
    slot_limits: SlotLimits = NO_LIMITS
    #: Ids of batches: the job of the first one that has a slot makes room for this one, and goes on
    #: when slots are free.
    instead_of: Sequence[int] = ()

    @property
    def streams(self) -> bool:
        """Whether somebody may stream the pieces of one of its jobs."""
        return self.pieces is not None


class Cancel(NamedTuple):
    """Nobody wants the job of a batch any more, which a device has in slots."""

    id: int
