"""The jobs that are under way: begun, as far as Celery knows, and not settled yet.

When the broker's connection breaks, it delivers again what was not acknowledged: also the jobs that
a device is computing just then. They need not run twice. The message that came last takes the place
of the one before, which can no longer be acknowledged, and the job goes on.
"""

import logging
import os
from time import monotonic

from celery.worker import state as worker_state

from batchery_worker.request import BatchRequest
from batchery_worker.ticket import Ticket

logger = logging.getLogger("batchery.pool")


class Accepted:
    """Tickets by the id of their job; for one thread."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        """How many jobs are under way."""
        return len(self._tickets)

    def add(self, ticket: Ticket, pid: int) -> None:
        """Tells Celery that a job begins, unless it knows; `pid` is the process that runs it."""
        if ticket.accepted:
            return
        ticket.accepted = True
        self._tickets[ticket.task_id] = ticket
        _accept(ticket, pid)

    def wants(self, ticket: Ticket) -> bool:
        """Whether a job shall still run: it may be revoked, or expire, while it waits here."""
        request = ticket.request
        if request is None:
            return True
        if ticket.accepted:
            # A suspect that was revoked while it ran must not get another device to kill.
            if request.discarded:
                self.remove(ticket)
            return not request.discarded
        try:
            return not request.revoked()
        except Exception:
            # It stores the revocation, which may fail; the other jobs of the batch shall run.
            logger.exception("%s[%s] cannot be revoked", ticket.task_name, ticket.task_id)
            return True

    def remove(self, ticket: Ticket) -> None:
        """Forgets a job that is settled, or that nobody wants any more."""
        # Its message may have come again meanwhile, as a job of its own.
        if self._tickets.get(ticket.task_id) is ticket:
            del self._tickets[ticket.task_id]

    def takes(self, newer: Ticket) -> bool:
        """Whether a message that was delivered again is of a job that runs here, or has succeeded.

        Then it needs no run of its own: it is settled together with the job, or at once.
        """
        request = newer.request
        if request is None or not request.delivery_info.get("redelivered"):
            return False
        if request.id in worker_state.successful_requests:
            # The result is stored; only the acknowledgement was lost with the connection.
            logger.info("%s[%s] came again and is done already", newer.task_name, newer.task_id)
            worker_state.task_ready(request, successful=True)
            request.acknowledge()
            return True
        older = self._tickets.get(newer.task_id)
        if older is None or not _is_same_run(older, newer):
            return False
        logger.info("%s[%s] came again while it runs: it goes on", newer.task_name, newer.task_id)
        _replace(older, newer, request)
        return True


def _is_same_run(older: Ticket, newer: Ticket) -> bool:
    """Whether two messages of one id ask for the same run: a retry has the id of its job, too."""
    if older.request is None or older.request.discarded:
        return False
    return bool(older.message.get("retries") == newer.message.get("retries"))


def _replace(ticket: Ticket, newer: Ticket, request: BatchRequest) -> None:
    """Lets a job under way be settled through the message that came last."""
    before = ticket.request
    assert before is not None
    # Celery counts requests, not ids: the one that nobody will settle must not stay.
    worker_state.active_requests.discard(before)
    worker_state.reserved_requests.discard(before)
    ticket.request = request
    ticket.callback = newer.callback
    ticket.accept_callback = newer.accept_callback
    ticket.error_callback = newer.error_callback
    _accept(ticket, before.worker_pid or os.getpid())


def _accept(ticket: Ticket, pid: int) -> None:
    try:
        ticket.accept_callback(pid, monotonic())
    except Exception:
        logger.exception("%s[%s] cannot be accepted", ticket.task_name, ticket.task_id)
