"""One call of the pool by Celery, and the batch in which a device runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchery.protocol.multi_item import Form
from batchery_worker.job import Batch
from batchery_worker.request import BatchRequest, LeaseHandle


@dataclass(slots=True)
class TaskCall:
    """One call of the pool by Celery, for one message of a batch task."""

    #: Celery's tracer.
    target: Callable[..., tuple[int, Any, float]]
    #: Arguments of the tracer: task name, task id, headers of the message, and more.
    args: Sequence[Any]
    callback: Callable[[tuple[int, Any, float]], None]
    accept_callback: Callable[[int, float], None]
    error_callback: Callable[[Any], None]
    #: The request whose methods the callbacks are; None for a caller that is not Celery's worker.
    request: BatchRequest | None
    items: Sequence[Any] = ()
    #: Whether this is a multi-item job, and of which form.
    is_multi_item: Form = False
    #: What its function may see of the request, encoded; empty if it sees nothing.
    context: bytes = b""
    #: Whether Celery was told that the job has begun.
    accepted: bool = False
    #: Why Celery's tracer completes the job; None if a device may commit it.
    tracer_reason: str | None = None
    #: What the listeners of the job share, made by `commit/listeners.py`; None before the first.
    listened: Any = None
    #: Name under which the task is registered.
    task_name: str = field(init=False)
    #: Id of the job.
    task_id: str = field(init=False)
    #: The message's headers, with `args` and `kwargs` decoded.
    message: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.task_name, self.task_id, self.message = self.args[:3]

    @property
    def lease(self) -> LeaseHandle | None:
        """The lease of its message; None if there is none, or none any more."""
        return None if self.request is None else self.request.lease

    @property
    def publish_tag(self) -> str | None:
        """Tag of its message, the same at each delivery; None for other transports."""
        if self.request is None:
            return None
        tag: str | None = self.request.message.properties.get("publish_tag")
        return tag


@dataclass(slots=True)
class DispatchedBatch:
    """A batch on a device."""

    batch: Batch[TaskCall]
    dispatched_s: float
    #: Maximum time that it may run, in seconds; then its process is killed.
    hard_limit_s: float | None = None
    #: Whether it goes before what the device held already.
    urgent: bool = False
    #: Whether it reached the hard limit.
    expired: bool = False
    #: When it began, less the time of urgent batches since then; its time limit counts from here.
    #: A batch begins when it is the first one of its device, an urgent one when the device says so.
    began_s: float | None = None
    #: The note of it in the broker, made by `dispatch/poison.py`.
    note: object | None = None

    @property
    def is_reserved(self) -> bool:
        """Whether its jobs may kill a worker, so that no other job may run."""
        return self.batch.jobs[0].recovered

    def left_s(self, now_s: float) -> float:
        """How much of its hard limit is left; only for a batch that has one and has begun."""
        assert self.began_s is not None
        assert self.hard_limit_s is not None
        return self.began_s + self.hard_limit_s - now_s

    def interrupts(self, other: "DispatchedBatch") -> bool:
        """Whether it runs between the passes of another batch of its device."""
        return self.urgent and self is not other and self.began_s is not None
