"""The jobs in flight: Celery was told that they have begun, and they are not settled yet."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar

from celery.worker import state as worker_state

from batchery.protocol.headers import Form
from batchery_worker.request import BatchRequest, LeaseHandle

logger = logging.getLogger("batchery.pool")

_REVOKED: Any = worker_state.revoked


@dataclass(slots=True)
class TaskCall:
    """A job of a batch task, by Celery's own request."""

    request: BatchRequest
    items: Sequence[Any] = ()
    #: Whether this is a multi-item job, and of which form.
    is_multi_item: Form = False
    #: What its function may see of the request.
    context: Mapping[str, Any] = field(default_factory=dict)
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

    #: Whether it has no request of Celery's, as those of `device/plain_call.py`.
    is_plain: ClassVar[bool] = False
    #: Sends the events of a plain one: here its request does that.
    send: ClassVar[None] = None

    def __post_init__(self) -> None:
        request: Any = self.request
        self.task_name, self.task_id, self.message = request.type, request.id, request.request_dict

    @property
    def embed(self) -> Mapping[str, Any]:
        """Callbacks, and what follows in a chain."""
        return self.request.embed or {}

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Its keyword arguments."""
        return self.message.get("kwargs") or {}

    def accept(self, pid: int) -> None:
        """Tells Celery that it begins in a process."""
        try:
            self.request.on_accepted(pid, monotonic())
        except Exception:
            logger.exception("%s[%s] cannot be accepted", self.task_name, self.task_id)

    @property
    def lease(self) -> LeaseHandle | None:
        """The lease of its message; None if there is none, or none any more."""
        return self.request.lease

    @property
    def publish_tag(self) -> str | None:
        """Tag of its message, the same at each delivery; None for other transports."""
        tag: str | None = self.request.message.properties.get("publish_tag")
        return tag


class InFlight:
    """Jobs in flight, by id; for one thread."""

    def __init__(self) -> None:
        self._calls: dict[str, TaskCall] = {}

    def __len__(self) -> int:
        """The number of jobs in flight."""
        return len(self._calls)

    def add(self, call: TaskCall, pid: int) -> None:
        """Tells Celery that a job begins, unless it was told; `pid` is the process that runs it."""
        if call.accepted:
            return
        call.accepted = True
        self._calls[call.task_id] = call
        call.accept(pid)

    def wants(self, call: TaskCall) -> bool:
        """Whether a job must still run; it may have been revoked, or have expired."""
        if call.is_plain and call.task_id not in _REVOKED:
            return True
        request = call.request
        if call.accepted:
            # A suspect that was revoked while it ran must not kill another device.
            if request.discarded:
                self.remove(call)
            return not request.discarded
        try:
            return not request.revoked()
        except Exception:
            # Celery stores the revocation, which may fail. The other jobs of the batch must run.
            logger.exception("%s[%s] cannot be revoked", call.task_name, call.task_id)
            return True

    def __iter__(self) -> Iterator[TaskCall]:
        return iter(list(self._calls.values()))

    def remove(self, call: TaskCall) -> None:
        """Forgets a job that is settled, or that nobody wants any more."""
        # Its message may have been redelivered meanwhile, as another call.
        if self._calls.get(call.task_id) is call:
            del self._calls[call.task_id]
