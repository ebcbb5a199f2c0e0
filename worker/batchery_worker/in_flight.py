"""The jobs in flight: Celery was told that they have begun, and they are not settled yet.

After a broken connection the broker redelivers every message that was not acknowledged, also those
of jobs that a device is computing. Such a job must not run twice. Its new message replaces the
earlier one, which can no longer be acknowledged, and the job goes on.
"""

import logging
import os
from time import monotonic

from celery.worker import state as worker_state

from batchery_worker.request import BatchRequest
from batchery_worker.task_call import TaskCall

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
        _accept(call, pid)

    def wants(self, call: TaskCall) -> bool:
        """Whether a job must still run; it may have been revoked, or have expired."""
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
