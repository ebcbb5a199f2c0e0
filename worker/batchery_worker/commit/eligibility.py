"""Decides which jobs a device may commit by itself, and makes the contexts of results and pieces.

All other jobs take the slow way, by Celery's own tracer.
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from celery import Celery
from celery.app import trace

from batchery.protocol.headers import HEADER, is_packed, is_streamed, read_keep_s, read_stream_name
from batchery.settings import Settings
from batchery.task import BatchTask
from batchery.transport.lease_store import LeaseStore
from batchery_worker.commit import sentry
from batchery_worker.commit.committer import ALWAYS_STORED, only_celery_stores, stored_fields
from batchery_worker.commit.listeners import listens_after
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import Job
from batchery_worker.work import CommitContext, JobCommit, PieceContext

#: Reasons of single jobs, besides those that `request_needs_tracer` gives.
NO_LEASE = "no lease: another broker or transport, acks_late off, or a lease that was lost"
ODD_FIELDS = "fields of its result that only Celery can store"

logger = logging.getLogger("batchery.pool")

#: Reasons of all jobs of a task, each with what would make it go.
FIXES = {
    "an overridden __call__": "put what it does into the function, or into before_start and"
    " after_return",
    "a wrapper of build_tracer": "use signals or hooks instead, or let it be",
    "Sentry's traces": "use the version of sentry-sdk that constraints.txt names",
    "a result backend of its own": "leave `backend` to the app",
    "a result backend other than Celery's for Redis": "keep results in Redis",
    "a result serializer other than JSON": "leave result_serializer at json",
    "compressed results": "leave result_compression unset",
}


def task_needs_tracer(app: Celery, task: BatchTask) -> str | None:
    """The reason why all jobs of a task need the tracer; None if they do not."""
    own_call = sentry.unwrapped(type(task).__call__) is not BatchTask.__call__
    own_tracer = trace.build_tracer.__module__ not in (trace.__name__, sentry.INTEGRATION)
    clauses = (
        (own_call, "an overridden __call__"),
        (own_tracer, "a wrapper of build_tracer"),
        (sentry.is_tracing() and not sentry.can_trace(), "Sentry's traces"),
    )
    reason = next((reason for holds, reason in clauses if holds), None)
    return reason or only_celery_stores(app, task)


def warn_of_tracer(app: Celery, tasks: Iterable[BatchTask]) -> None:
    """Logs which tasks' jobs all need the tracer, why, and what would change it."""
    by_reason = defaultdict[str, list[str]](list)
    for task in tasks:
        if reason := task_needs_tracer(app, task):
            by_reason[reason].append(task.name)
    for reason, names in by_reason.items():
        logger.warning(
            "each job of %s takes Celery's tracer, which is about ten times slower than a commit by"
            " the device, because of %s: %s",
            *(", ".join(names), reason, FIXES[reason]),
        )


def request_needs_tracer(message: Mapping[str, Any], embed: Mapping[str, Any] | None) -> str | None:
    """The reason why one job needs the tracer; None if it does not."""
    if message.get("replaced_task_nesting"):
        return "a job that replaced another"
    for name in ("callbacks", "errbacks", "chain", "chord"):
        if embed and embed.get(name):
            return name
    return None


class CommitEligibility:
    """Decides for every batch before it goes to its device; costs a few µs per job."""

    def __init__(self, app: Celery) -> None:
        self._find_tracer_reason = cache(partial(task_needs_tracer, app))
        self._extended = bool(app.conf.find_value_for_key("extended", "result"))

    def context(
        self,
        task: BatchTask,
        jobs: Sequence[Job[TaskCall]],
        store: LeaseStore | None,
        formed_s: float,
    ) -> CommitContext | None:
        """Makes the commit context of a batch.

        Args:
            task: That of the jobs.
            jobs: About to go to the device.
            store: Has their leases, but for those of jobs that came before a failover.
            formed_s: When the batch was formed, on the clock of `Job.sent_s`.

        Returns:
            None if Celery's tracer must complete all of the jobs.
        """
        eligible: list[JobCommit] = [None] * len(jobs)
        for index, job in enumerate(jobs):
            lease = job.payload.lease
            if lease is not None and lease.store is store and store.holds(lease.token):
                eligible[index] = self._of_job(task, job, lease.token, formed_s)
            else:
                job.payload.tracer_reason = NO_LEASE
        if store is None or not any(eligible):
            return None
        completion_streams, keep_s, packed = _replies(jobs)
        return CommitContext(
            store=store,
            jobs=eligible,
            text_chars=_text_chars(task, jobs[0].payload),
            is_listened=listens_after(task),
            completion_streams=completion_streams,
            keep_s=keep_s,
            packed=packed,
        )

    def _of_job(
        self, task: BatchTask, job: Job[TaskCall], token: str, formed_s: float
    ) -> JobCommit:
        call = job.payload
        call.tracer_reason = self._find_tracer_reason(task)
        if call.tracer_reason is None and not call.is_plain:
            call.tracer_reason = request_needs_tracer(call.message, call.embed)
        if call.tracer_reason is not None:
            return None
        fields = stored_fields(
            call.message, ignores_result=bool(task.ignore_result), extended=self._extended
        )
        if fields and not ALWAYS_STORED.isdisjoint(fields):
            call.tracer_reason = ODD_FIELDS
            return None
        return token, round((formed_s - job.sent_s) * 1e3, 3), fields


def _replies(
    jobs: Sequence[Job[TaskCall]],
) -> tuple[dict[str, list[int]], dict[int, int], set[int]]:
    """What jobs ask for, by their indexes: completion streams, `keep_s`, and packed vectors."""
    completion_streams: dict[str, list[int]] = {}
    kept: dict[int, int] = {}
    packed: set[int] = set()
    for index, job in enumerate(jobs):
        header = job.payload.message.get(HEADER)
        if header is None:
            continue
        if (name := read_stream_name(header)) is not None:
            completion_streams.setdefault(name, []).append(index)
        if (keep_s := read_keep_s(header)) is not None:
            kept[index] = keep_s
        if is_packed(header):
            packed.add(index)
    return completion_streams, kept, packed


def _text_chars(task: BatchTask, call: TaskCall) -> int | None:
    """Maximum length of a result in events and the log, in characters; None without readers."""
    if trace.logger.isEnabledFor(logging.INFO) or has_readers(call, task):
        # A task may set no limit.
        return task.resultrepr_maxsize or sys.maxsize
    return None


def has_readers(call: TaskCall, task: BatchTask) -> bool:
    """Whether events of the job are sent."""
    if call.is_plain:
        return call.send is not None
    eventer: Any = call.request.eventer
    if not eventer or not eventer.enabled or not task.send_events:
        return False
    return not eventer.groups or "task" in eventer.groups


def piece_context(
    jobs: Sequence[Job[TaskCall]], store: LeaseStore | None, settings: Settings
) -> PieceContext | None:
    """Makes the context of a batch's pieces; None if nobody streams one of its jobs.

    Args:
        jobs: About to go to the device.
        store: Has their leases.
        settings: Of the worker.
    """
    streamed = {
        index: job.payload
        for index, job in enumerate(jobs)
        if (header := job.payload.message.get(HEADER)) is not None and is_streamed(header)
    }
    if not streamed:
        return None
    leases = {index: call.lease for index, call in streamed.items()}
    return PieceContext(
        tokens={
            index: "" if lease is None else lease.token
            for index, lease in leases.items()
            if store is None or (lease is not None and lease.store is store)
        },
        resumed=[call.task_id for call in streamed.values() if _may_have_run(call)],
        max_pieces=settings.stream_max_pieces,
        grace_s=settings.stream_grace_s,
        store=store,
    )


def _may_have_run(call: TaskCall) -> bool:
    """Whether a job has been on a device before: here, in another worker, or before a retry."""
    message = call.message
    again = message.get("retries") or (message.get("delivery_info") or {}).get("redelivered")
    return call.accepted or bool(again)
