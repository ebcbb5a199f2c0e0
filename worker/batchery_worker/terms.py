"""What a device must know to store results by itself, besides the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: What Celery stores of every job, and we of every batch. A stamp of such a name would take its
#: place, which is left to Celery.
ALWAYS_STORED = frozenset(
    {"status", "result", "traceback", "children", "date_done", "task_id", "batch"}
)

#: Of one job: token of its lease; how long it waited, in ms; further fields of the stored result,
#: None if none is stored at all. In place of all that, None for a job that needs the tracer.
JobTerms = tuple[str, float, Mapping[str, Any] | None] | None


class CacheTerms(NamedTuple):
    """What a device must know to keep results for equal items."""

    #: Of the results, as the task has it.
    version: str
    #: How long one is kept, in seconds.
    ttl_s: float
    #: Most bytes of all results of the task.
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Of a batch; a plain tuple per job, as each one is pickled."""

    #: Id of this worker among those that lease; then in the broker's database, the number of which
    #: follows, the ZSET of all workers and the HASH of this one's leases.
    worker: str
    workers_key: str
    lease_key: str
    broker_db: int
    jobs: Sequence[JobTerms]
    #: Longest text of a result that somebody wants to read, in characters: in an event or in the
    #: log. None if nobody does.
    text_chars: int | None = None
    #: Name of a reply -> index of each job that asks for it.
    replies: Mapping[str, Sequence[int]] = field(default_factory=dict)


def job_terms(
    token: str,
    waited_ms: float,
    message: Mapping[str, Any],
    *,
    ignores_result: bool,
    extended: bool,
) -> JobTerms:
    """The terms of one job.

    Args:
        token: Of its lease.
        waited_ms: How long it waited in the worker.
        message: The headers of its message, with `args` and `kwargs` decoded.
        ignores_result: What its task says, where the message does not.
        extended: The setting `result_extended`.
    """
    fields = stored_fields(message, ignores_result=ignores_result, extended=extended)
    if fields and not ALWAYS_STORED.isdisjoint(fields):
        return None
    return token, round(waited_ms, 3), fields


def stored_fields(
    message: Mapping[str, Any], *, ignores_result: bool, extended: bool
) -> Mapping[str, Any] | None:
    """The fields that Celery stores of one job but not of another.

    Args:
        message: The headers of its message, with `args` and `kwargs` decoded.
        ignores_result: What its task says, where the message does not.
        extended: The setting `result_extended`.

    Returns:
        The fields; None if the job's result is not stored.
    """
    ignores = message.get("ignore_result")
    if ignores_result if ignores is None else ignores:
        return None
    fields = {}
    if message.get("group"):
        fields["group_id"] = message["group"]
    if message.get("parent_id"):
        fields["parent_id"] = message["parent_id"]
    if extended:
        fields.update(_extended_fields(message))
    return fields


def _extended_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "name": message.get("task"),
        "args": message.get("args"),
        "kwargs": message.get("kwargs"),
        "worker": message.get("hostname"),
        "retries": message.get("retries"),
        "queue": (message.get("delivery_info") or {}).get("routing_key"),
    }
    stamps = message.get("stamps")
    if stamps:
        headers = message.get("stamped_headers")
        fields["stamped_headers"] = headers
        fields.update((name, value) for name, value in stamps.items() if name in (headers or ()))
    return fields
