"""The context that a device needs to commit results by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: The context of one job: token of its lease; how long it waited, in ms; further fields of the
#: stored result, None if no result is stored. None for a job that needs the tracer.
JobCommit = tuple[str, float, Mapping[str, Any] | None] | None


class CachePolicy(NamedTuple):
    """How a device caches the results of a task."""

    #: Version of the results: the option `cache` of the task.
    version: str
    #: How long a result is kept, in seconds.
    ttl_s: float
    #: Maximum number of bytes of all results of the task.
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CommitContext:
    """The context of a batch. Each job has a plain tuple, because it is pickled."""

    #: Id by which this worker holds leases.
    worker: str
    #: ZSET of all workers, in the broker's database.
    workers_key: str
    #: HASH of this worker's leases, in the broker's database.
    lease_key: str
    #: Number of the broker's database.
    broker_db: int
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
