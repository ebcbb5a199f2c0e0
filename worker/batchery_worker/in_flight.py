"""The jobs in flight: Celery was told that they have begun, and they are not settled yet.

After a broken connection the broker redelivers every message that was not acknowledged, also those
of jobs that a device is computing. Such a job must not run twice. Its new message replaces the
earlier one, which can no longer be acknowledged, and the job goes on.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from celery.worker import state as worker_state

from batchery.protocol.headers import Form
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
    def is_plain(self) -> bool:
        """Whether it has no request of Celery's, as those of `device/plain_call.py`."""
        return False

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has revoked it; only of a plain one."""
        return True

    @property
    def embed(self) -> Mapping[str, Any]:
        """Callbacks, and what follows in a chain."""
        return (self.request.embed if self.request is not None else None) or {}

    @property
    def keywords(self) -> Mapping[str, Any]:
        """Its keyword arguments."""
        return self.message.get("kwargs") or {}

    def accept(self, pid: int) -> None:
        """Tells Celery that it begins in a process."""
        _accept(self, pid)

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
    #: Whether all of its jobs were terminated, so that it must end soon.
    is_unwanted: bool = False
    #: Until when its device may be silent, and its limits do not count, as its model is loaded or
    #: Redis may be away; 0 if neither is so.
    excused_until_s: float = 0.0
    #: Since when that is so.
    excused_since_s: float = 0.0
    #: How long the load of its model took, in seconds.
    load_s: float = 0.0
    #: When it began, less the time of urgent batches since then; its time limit counts from here.
    #: A batch begins when it is the first one of its device, an urgent one when the device says so.
    began_s: float | None = None
    #: Whether it is one job that shares its device with others at once, each in slots of its own.
    in_slots: bool = False
    #: How many of its items have a slot, or will have one.
    items_left: int = 0
    #: Whether it made room for a job of a higher class, and waits for a slot.
    is_aside: bool = False
    #: Up to when its lane was charged for its slots; 0 before the first time.
    charged_s: float = 0.0
    #: The note of it in the broker, made by `dispatch/poison.py`.
    note: object | None = None

    @property
    def is_reserved(self) -> bool:
        """Whether its jobs may kill a worker, so that no other job may run."""
        return self.batch.jobs[0].recovered

    def ran_s(self, now_s: float) -> float:
        """For how long it has run, in seconds; 0 if it has not begun."""
        return 0.0 if self.began_s is None else max(0.0, now_s - self.began_s)

    @property
    def due_s(self) -> float:
        """When it must have ended, or loaded its model; infinite while its time has no limit."""
        if self.excused_until_s:
            return self.excused_until_s
        if self.began_s is None or self.hard_limit_s is None:
            return inf
        return self.began_s + self.hard_limit_s

    @property
    def was_too_long(self) -> bool:
        """Whether its only job is to blame that it reached the hard limit."""
        # Behind an urgent one another has begun.
        return self.expired and len(self.batch.jobs) == 1 and not self.urgent

    def interrupts(self, other: "DispatchedBatch") -> bool:
        """Whether it runs between the passes of another batch of its device."""
        return self.urgent and self is not other and self.began_s is not None


logger = logging.getLogger("batchery.pool")


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
        if request is None:
            return True
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

    def takes(self, newer: TaskCall) -> bool:
        """Whether a redelivered message belongs to a job that runs here, or has succeeded.

        Such a message needs no run of its own: it is settled together with the job, or at once.
        """
        request = newer.request
        if request is None or not request.delivery_info.get("redelivered"):
            return False
        if request.id in worker_state.successful_requests:
            # The result is stored; only the acknowledgement was lost with the connection.
            logger.info(
                "%s[%s] was redelivered but is done already", newer.task_name, newer.task_id
            )
            worker_state.task_ready(request, successful=True)
            request.acknowledge()
            return True
        older = self._calls.get(newer.task_id)
        if older is None or not _is_same_run(older, newer):
            return False
        lease = older.lease
        if lease is not None and not lease.store.holds(lease.token):
            # Its result will be refused.
            return False
        logger.info(
            "%s[%s] was redelivered while it runs, and goes on", newer.task_name, newer.task_id
        )
        _replace(older, newer, request)
        return True


def _is_same_run(older: TaskCall, newer: TaskCall) -> bool:
    """Whether two messages with one id are the same attempt; a retry keeps the id of its job."""
    if older.request is None or older.request.discarded:
        return False
    return bool(older.message.get("retries") == newer.message.get("retries"))


def _replace(call: TaskCall, newer: TaskCall, request: BatchRequest) -> None:
    """Makes a job in flight settle the newer message."""
    before = call.request
    assert before is not None
    # Celery counts requests, not ids. Nobody will settle the older request, so it must go.
    worker_state.active_requests.discard(before)
    worker_state.reserved_requests.discard(before)
    call.request = request
    call.callback = newer.callback
    call.accept_callback = newer.accept_callback
    call.error_callback = newer.error_callback
    _accept(call, before.worker_pid or os.getpid())


def _accept(call: TaskCall, pid: int) -> None:
    try:
        call.accept_callback(pid, monotonic())
    except Exception:
        logger.exception("%s[%s] cannot be accepted", call.task_name, call.task_id)
