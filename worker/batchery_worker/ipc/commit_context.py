"""What a device must know to store results by itself, in addition to the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: What a device must know of one job: token of its lease; how long it waited, in ms; further fields
#: of the stored result, None if no result is stored. None for a job that needs the tracer.
JobCommit = tuple[str, float, Mapping[str, Any] | None] | None


class CachePolicy(NamedTuple):
    """What a device must know to keep results for equal items."""

    #: Version of the results, as the task has it.
    version: str
    #: How long a result is kept, in seconds.
    ttl_s: float
    #: Maximum number of bytes of all results of the task.
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CommitContext:
    """What a device must know of a batch; with a plain tuple per job, as each one is pickled."""

    #: Id of this worker as lease holder.
    worker: str
    #: ZSET of all workers, in the broker's database.
    workers_key: str
    #: HASH of this worker's leases, in the broker's database.
    lease_key: str
    #: Number of the broker's database.
    broker_db: int
    jobs: Sequence[JobCommit]
    #: Longest text of a result that an event or the log shows, in characters; None if nobody reads
    #: it.
    text_chars: int | None = None
    #: Name of a completion stream -> index of each job that asks for it.
    completion_streams: Mapping[str, Sequence[int]] = field(default_factory=dict)
