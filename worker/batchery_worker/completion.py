"""Completes jobs through Celery's own tracer, with the outcome that a device has computed.

The tracer stores the result, calls the hooks, sends the signals, publishes callbacks and the next
step of a chain, and counts chord parts: all of it Celery's own code. The task answers at once, from
the context that is set around it here. Threads do this, as every step may wait for Redis.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry

from batchery.task import Computed, computed
from batchery_worker.ticket import Ticket

logger = logging.getLogger("batchery.pool")

#: What the tracer reports like an error, and is none.
NOT_FAILURES = (Retry, Ignore, Reject)

#: Facts of the batch of the job that this thread is completing.
_facts: ContextVar[Mapping[str, Any] | None] = ContextVar("batchery_facts", default=None)


class Completion:
    """Threads that run the tracer."""

    def __init__(
        self, app: Celery, threads: int, deliver: Callable[[Callable[[], None]], None]
    ) -> None:
        """Starts no thread yet.

        Args:
            app: Whose result backend is used.
            threads: How many jobs are completed at a time, at most.
            deliver: Runs a callable on the pool's thread; may be called from any thread.
        """
        self._app = app
        self._deliver = deliver
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="batchery-completion")

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

    def stop(self) -> None:
        """Waits for the jobs that were submitted."""
        self._threads.shutdown()

    def _complete(
        self,
        ticket: Ticket,
        outcome: Callable[[Any], Any],
        facts: Mapping[str, Any] | None,
        settled: Callable[[bool], None],
    ) -> None:
        try:
            backend = self._app.backend
            _tag_results(backend)
            computed.set(Computed(ticket.task_id, outcome(backend)))
            _facts.set(facts)
            is_error, value, _ = ticket.target(*ticket.args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the job must be settled
            logger.error("%s[%s] cannot be completed: %r", ticket.task_name, ticket.task_id, error)
            info = ExceptionInfo()
            self._deliver(lambda: _finish(ticket.error_callback, info, settled, True))
        else:
            # The tracer timed only itself.
            runtime_s = facts["forward_ms"] / 1e3 if facts else 0.0
            failed = bool(is_error) and not isinstance(_raised(value), NOT_FAILURES)
            result = (is_error, value, runtime_s)
            self._deliver(lambda: _finish(ticket.callback, result, settled, failed))
        finally:
            computed.set(None)
            _facts.set(None)


def _finish(
    callback: Callable[[Any], None], result: Any, settled: Callable[[bool], None], failed: bool
) -> None:
    try:
        callback(result)
    finally:
        settled(failed)


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
