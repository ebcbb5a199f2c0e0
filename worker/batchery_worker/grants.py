"""Which jobs a device may commit by itself, and what it must know for that."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.app import trace

from batchery import packed
from batchery.reply import reply_of
from batchery.task import BatchTask
from batchery_worker.needs import TracerNeeds
from batchery_worker.portable import is_portable
from batchery_worker.request import ledger_of
from batchery_worker.scheduler import Job
from batchery_worker.terms import JobTerms, Terms, job_terms
from batchery_worker.ticket import Ticket


class Grants:
    """Looks at every batch before it leaves for its device; costs a few microseconds per job."""

    def __init__(self, app: Celery) -> None:
        self._needs = TracerNeeds(app)
        self._extended = bool(app.conf.find_value_for_key("extended", "result"))

    def terms(
        self, task: BatchTask, jobs: Sequence[Job[Ticket]], dispatched_s: float
    ) -> Terms | None:
        """The terms of a batch.

        Args:
            task: Of all its jobs.
            jobs: About to be dispatched.
            dispatched_s: Now, on the scheduler's clock.

        Returns:
            None if Celery's tracer has to complete all of its jobs.
        """
        leases = [job.payload.lease for job in jobs]
        ledger = ledger_of(leases)
        if ledger is None:
            return None
        granted: list[JobTerms] = [None] * len(jobs)
        for index, (job, lease) in enumerate(zip(jobs, leases, strict=True)):
            if lease is not None and lease.ledger is ledger and ledger.holds(lease.token):
                granted[index] = self._of_job(task, job, lease.token, dispatched_s)
        if not any(granted):
            return None
        return Terms(
            worker=ledger.worker,
            workers_key=ledger.keys.workers,
            lease_key=ledger.lease_key,
            broker_db=ledger.db,
            jobs=granted,
            text_chars=_text_chars(task, jobs[0].payload),
            replies=_replies(jobs),
        )

    def _of_job(
        self, task: BatchTask, job: Job[Ticket], token: str, dispatched_s: float
    ) -> JobTerms:
        ticket = job.payload
        assert ticket.request is not None
        if self._needs.why(task, ticket.message, ticket.request.embed):
            return None
        terms = job_terms(
            token,
            (dispatched_s - job.arrived_s) * 1e3,
            ticket.message,
            ignores_result=bool(task.ignore_result),
            extended=self._extended,
        )
        fields = terms[-1] if terms else None
        return terms if is_portable((fields or {}).values()) else None


def _replies(jobs: Sequence[Job[Ticket]]) -> dict[str, list[int]]:
    """Which jobs ask for which reply."""
    replies: dict[str, list[int]] = {}
    for index, job in enumerate(jobs):
        header = job.payload.message.get(packed.HEADER)
        if header is not None and (name := reply_of(header)) is not None:
            replies.setdefault(name, []).append(index)
    return replies


def _text_chars(task: BatchTask, ticket: Ticket) -> int | None:
    """How much of a result an event or a line of the log shows; None if nobody asks for either."""
    if trace.logger.isEnabledFor(logging.INFO) or has_readers(ticket, task):
        # A task may say that there is no limit.
        return task.resultrepr_maxsize or sys.maxsize
    return None


def has_readers(ticket: Ticket, task: BatchTask) -> bool:
    """Whether events of the job are sent."""
    eventer: Any = ticket.request and ticket.request.eventer
    if not eventer or not eventer.enabled or not task.send_events:
        return False
    return not eventer.groups or "task" in eventer.groups
