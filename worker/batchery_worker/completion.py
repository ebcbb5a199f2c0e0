"""Completes jobs through Celery's own tracer, with the outcome that a device has computed.

The tracer stores the result, calls the hooks, sends the signals, publishes callbacks and the next
step of a chain, and counts chord parts: all of it Celery's own code. The task answers at once, from
the context that is set around it here. Threads do this, as every step may wait for Redis.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from time import monotonic
from typing import Any

import redis
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery import Celery
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.states import STARTED

from batchery.task import Computed, computed
from batchery.transport.sending import sending_once
from batchery_worker.chords import share_claims
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

logger = logging.getLogger("batchery.pool")

#: What the tracer reports like an error, and is none.
NOT_FAILURES = (Retry, Ignore, Reject)

#: Facts of the batch of the job that this thread is completing.
_facts: ContextVar[Mapping[str, Any] | None] = ContextVar("batchery_facts", default=None)


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
        #: By name of the task; Celery makes new ones after each reconnect to the broker.
        self._tracers: dict[str, Any] = {}
        self._deliver = deliver
        self._on_fenced = on_fenced
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
        self._threads.submit(self._complete, ticket, outcome, facts, settled)

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

    def _complete(
        self,
        ticket: Ticket,
        outcome: Callable[[Any], Any],
        facts: Mapping[str, Any] | None,
        settled: Callable[[bool], None],
    ) -> None:
        if ticket.started is not None:
            # It was submitted before, so that a thread has it; the last state must come last.
            wait([ticket.started])
        if _is_fenced(ticket):
            self._deliver(lambda: _finish(lambda _: self._on_fenced(ticket), None, settled, False))
            return
        try:
            backend = self._app.backend
            _tag_results(backend)
            make_patient(backend)
            share_claims(backend)
            self._time_device(ticket)
            computed.set(Computed(ticket.task_id, outcome(backend)))
            _facts.set(facts)
            with patient(Patience()):
                is_error, value = self._trace(ticket)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job must be settled
            logger.error("%s[%s] cannot be completed: %r", ticket.task_name, ticket.task_id, error)
            if ticket.request is not None and is_away(self._app.backend, error):
                self._deliver(lambda: _finish(lambda _: _give_back(ticket), None, settled, False))
                return
            info = ExceptionInfo()
            self._deliver(lambda: _finish(ticket.error_callback, info, settled, True))
        else:
            # Without the tracer's own time.
            runtime_s = facts["forward_ms"] / 1e3 if facts else 0.0
            failed = bool(is_error) and not isinstance(_raised(value), NOT_FAILURES)
            result = (is_error, value, runtime_s)
            self._deliver(lambda: _finish(ticket.callback, result, settled, failed))
        finally:
            computed.set(None)
            _facts.set(None)

    def _trace(self, ticket: Ticket) -> tuple[Any, Any]:
        """Runs the tracer, whose messages are sent once: a worker may die before it is done."""
        request, lease = ticket.request, ticket.lease
        if request is None or lease is None:
            return ticket.target(*ticket.args)[:2]
        tag = request.message.properties.get("publish_tag")
        with sending_once(tag, {"job": ticket.task_id, "next": request.embed}) as sending:
            try:
                return ticket.target(*ticket.args)[:2]
            finally:
                if sending is not None and sending.is_marked:
                    lease.ledger.sent(lease.token, sending.publish_tag)

    def _time_device(self, ticket: Ticket) -> None:
        """Gives the task a tracer that counts the device's time as the task's run time."""
        task: Any = self._app.tasks[ticket.task_name]
        if task.__trace__ is None or task.__trace__ is not self._tracers.get(task.name):
            tracer = trace.build_tracer(
                task.name,
                task,
                app=self._app,
                hostname=ticket.message.get("hostname"),
                monotonic=_clock,
            )
            self._tracers[task.name] = task.__trace__ = tracer


def _clock() -> float:
    """The tracer's clock: once the task has answered, the device's time has passed as well."""
    facts = _facts.get()
    answered = facts is not None and computed.get() is None
    return monotonic() + (facts["forward_ms"] / 1e3 if facts and answered else 0.0)


def _finish(
    callback: Callable[[Any], None], result: Any, settled: Callable[[bool], None], failed: bool
) -> None:
    try:
        callback(result)
    finally:
        settled(failed)


def _is_fenced(ticket: Ticket) -> bool:
    """Whether another worker has the job now; asked just before its result is stored.

    In between somebody may still take it. Where Redis does not answer, the job counts as ours: at
    worst its result is stored twice.
    """
    lease = ticket.lease
    if lease is None:
        return False
    try:
        return lease.token not in lease.ledger.still_held([lease.token])
    except (redis.RedisError, OSError):
        return False


def _give_back(ticket: Ticket) -> None:
    # The one of now: the message may have come again while the result waited.
    if ticket.request is not None:
        give_back(ticket.request)


def _raised(info: ExceptionInfo) -> Any:
    """The exception itself; billiard wraps it together with its traceback."""
    error = info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def _tag_results(backend: Any) -> None:
    """Lets a backend write the facts of the batch into each result, as the field `batch`.

    Celery gives each thread a backend of its own; it has no public way to add a field.
    """
    if getattr(backend, "batchery_tagged", False):
        return
    stock = backend._get_result_meta

    def with_facts(*args: Any, **keywords: Any) -> dict[str, Any]:
        meta: dict[str, Any] = stock(*args, **keywords)
        facts = _facts.get()
        if facts is not None:
            meta["batch"] = dict(facts)
        return meta

    backend._get_result_meta = with_facts
    backend.batchery_tagged = True
