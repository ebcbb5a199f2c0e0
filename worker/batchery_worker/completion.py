"""Completes jobs on threads, as every step of Celery's tracer may wait for Redis.

What the tracer writes for a job of which nothing but messages and a result is left in the end is
held back, and written for many jobs in one step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import redis
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.states import STARTED

from batchery_worker.commit import Verdict
from batchery_worker.finish import Finish, Finisher
from batchery_worker.patience import (
    Patience,
    RanOut,
    is_away,
    make_patient,
    patient,
    publish_patiently,
)
from batchery_worker.request import give_back
from batchery_worker.ticket import Ticket
from batchery_worker.tracing import Job, Tracing, is_fenced, raised

logger = logging.getLogger("batchery.pool")

#: What the tracer reports like an error, and is none.
NOT_FAILURES = (Retry, Ignore, Reject)

#: Most jobs whose messages and results are written in one step. More of them save little, and
#: their callers wait for the last one.
MOST_TOGETHER = 32


class Completion:
    """Threads that run the tracer."""

    def __init__(
        self,
        app: Celery,
        threads: int,
        deliver: Callable[[Callable[[], None]], None],
        on_fenced: Callable[[Ticket], None],
    ) -> None:
        """Starts no thread yet.

        Args:
            app: Whose result backend is used.
            threads: How many jobs are completed at a time, at most.
            deliver: Runs a callable on the pool's thread; may be called from any thread.
            on_fenced: Drops a job that another worker has now; called on the pool's thread.
        """
        self._app = app
        self._deliver = deliver
        self._on_fenced = on_fenced
        self._tracing = Tracing(app)
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="batchery-completion")
        publish_patiently(app)

    def submit(
        self,
        ticket: Ticket,
        outcome: Callable[[Any], Any],
        facts: Mapping[str, Any] | None,
        settled: Callable[[bool], None],
    ) -> None:
        """Completes one job.

        Args:
            ticket: The job.
            outcome: Makes the outcome, as `batchery.outcome` defines them, given the backend that
                knows how exceptions are spelled.
            facts: Of the batch; stored with the result, None for a job that was never in one.
            settled: Called at the end, on the pool's thread, with whether the job failed.
        """
        self._waiting.append(Job(ticket, outcome, facts, settled, self._tracing.may_wait(ticket)))
        self._threads.submit(self._complete_next)

    def tell_started(self, ticket: Ticket, pid: int) -> None:
        """Stores that a job runs, for a task that is tracked; before its outcome, if it can.

        Args:
            ticket: The job.
            pid: Of the process that it runs in.
        """
        ticket.started = self._threads.submit(self._store_started, ticket, pid)

    def stop(self) -> None:
        """Waits for the jobs that were submitted."""
        self._threads.shutdown()

    def _store_started(self, ticket: Ticket, pid: int) -> None:
        task = self._app.tasks[ticket.task_name]
        ignored = ticket.message.get("ignore_result")
        if task.ignore_result if ignored is None else ignored:
            return
        request = Context(dict(ticket.message))
        meta = {"pid": pid, "hostname": request.hostname}
        try:
            with patient(Patience()):
                make_patient(task.backend)
                task.backend.store_result(ticket.task_id, meta, STARTED, request=request)
        except (Exception, RanOut):
            logger.exception("%s[%s] is not seen as started", ticket.task_name, ticket.task_id)

    def _complete_next(self) -> None:
        """Completes the job that waits longest, with others that may be completed together."""
        jobs = self._take()
        for job in jobs:
            self._complete(job)
        held_back = [(job, job.finish) for job in jobs if job.finish is not None]
        if held_back:
            self._finish_all(held_back)

    def _take(self) -> list[Job]:
        jobs: list[Job] = []
        with self._lock:
            while self._waiting and len(jobs) < MOST_TOGETHER:
                if jobs and not (jobs[0].may_wait and self._waiting[0].may_wait):
                    break
                jobs.append(self._waiting.popleft())
        return jobs

    def _complete(self, job: Job) -> None:
        """Runs the tracer; tells of the end, unless what was to be written is held back."""
        ticket = job.ticket
        if ticket.started is not None:
            # It was submitted before, so that a thread has it; the last state must come last.
            wait([ticket.started])
        if not job.may_wait and is_fenced(ticket):
            self._drop(job)
            return
        with self._settling(job):
            self._tracing.run(job)
            if job.finish is None:
                self._tell(job)

    def _finish_all(self, jobs: Sequence[tuple[Job, Finish]]) -> None:
        """Writes what was held back, and tells of the jobs' ends."""
        try:
            with patient(Patience()):
                verdicts = self._finisher().finish([finish for _, finish in jobs])
        except (redis.RedisError, RanOut):
            for job, _ in jobs:
                with self._settling(job):
                    raise
            return
        for (job, finish), verdict in zip(jobs, verdicts, strict=True):
            if verdict is Verdict.COMMITTED:
                self._tell(job, finish)
            elif verdict is Verdict.FENCED or is_fenced(job.ticket):
                self._drop(job)
            else:
                with self._settling(job):
                    self._tracing.replay(job)
                    self._tell(job)

    @contextmanager
    def _settling(self, job: Job) -> Iterator[None]:
        """Settles a job also if its completion breaks off."""
        ticket = job.ticket
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job must be settled
            job.finish = None
            logger.error("%s[%s] cannot be completed: %r", ticket.task_name, ticket.task_id, error)
            if ticket.request is not None and is_away(self._app.backend, error):
                self._deliver(lambda: _end(lambda _: _give_back(ticket), None, job, failed=False))
                return
            info = ExceptionInfo()
            self._deliver(lambda: _end(ticket.error_callback, info, job, failed=True))

    def _tell(self, job: Job, finish: Finish | None = None) -> None:
        """Tells Celery of a job's end; of one that is finished, the message as well."""
        is_error, value = job.answer
        # Without the tracer's own time.
        runtime_s = job.facts["forward_ms"] / 1e3 if job.facts else 0.0
        failed = bool(is_error) and not isinstance(raised(value), NOT_FAILURES)
        result = (is_error, value, runtime_s)

        def tell() -> None:
            request = job.ticket.request
            if finish is not None and request is not None:
                finish.lease.ledger.settled([finish.lease.token])
                # Celery's own code follows, which shall not acknowledge once more.
                request.acknowledged = True
            _end(job.ticket.callback, result, job, failed=failed)

        self._deliver(tell)

    def _drop(self, job: Job) -> None:
        self._deliver(lambda: _end(lambda _: self._on_fenced(job.ticket), None, job, failed=False))

    def _finisher(self) -> Finisher:
        if not hasattr(self._local, "finisher"):
            self._local.finisher = Finisher(self._app.backend)
        finisher: Finisher = self._local.finisher
        return finisher


def _end(callback: Callable[[Any], None], result: Any, job: Job, *, failed: bool) -> None:
    try:
        callback(result)
    finally:
        job.settled(failed)


def _give_back(ticket: Ticket) -> None:
    # The one of now: the message may have come again while the result waited.
    if ticket.request is not None:
        give_back(ticket.request)
