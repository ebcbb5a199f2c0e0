"""The jobs in flight: Celery was told that they have begun, and they are not settled yet."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from batchery.protocol.headers import Form
from batchery_worker.request import BatchRequest, LeaseHandle

logger = logging.getLogger("batchery.pool")


@dataclass(slots=True)
class TaskCall:
    """One call of the pool by Celery, for one message of a batch task."""

    #: Celery's tracer.
    target: Callable[..., tuple[int, Any, float]]
    #: Arguments of the tracer: task name, task id, headers of the message, and more.
    args: Sequence[Any]
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

    def __post_init__(self) -> None:
        self.task_name, self.task_id, self.message = self.args[:3]

    @property
    def is_plain(self) -> bool:
        """Whether it has no request of Celery's, as those of `device/plain_call.py`."""
        return False

    @property
    def send(self) -> None:
        """Its request sends its events."""
        return

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has revoked it; only of a plain one."""
        return True

    @property
    def embed(self) -> Mapping[str, Any]:
        """Callbacks, and what follows in a chain."""
        return self.request.embed or {}

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Its keyword arguments."""
        return self.message.get("kwargs") or {}

    @property
    def callback(self) -> Callable[[tuple[int, Any, float]], None]:
        """Called with the tracer's answer."""
        function: Callable[[tuple[int, Any, float]], None] = self.request.on_success
        return function

    @property
    def error_callback(self) -> Callable[[Any], None]:
        """Called where the tracer has none."""
        function: Callable[[Any], None] = self.request.on_failure
        return function

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
        if call.is_plain and call.is_wanted:
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
