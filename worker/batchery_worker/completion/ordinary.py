"""Ordinary tasks on the app's own pool: their results, too, wait while the backend is away.

Celery stores a failure for a job that succeeded while Redis was away for a moment. With leases, the
job can be given back instead.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from celery import Celery, signals
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.exceptions import Reject
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr

from batchery.retry import AWAY_ERRORS, RetryDeadlineExceeded
from batchery_worker.completion.backend import (
    for_completion,
    publish_until_deadline,
)
from batchery_worker.completion.tracer import drop_frames, full_info, plain_info

logger = logging.getLogger("batchery.pool")


def wait_in_children(app: Celery) -> None:
    """Makes results wait in the processes of a prefork pool that has not started yet."""

    def prepare(**_: Any) -> None:
        wait_here(app)

    signals.worker_process_init.connect(prepare, weak=False, dispatch_uid="batchery-results-wait")


def wait_here(app: Celery) -> None:
    """Makes results wait in this thread, which a solo pool computes on."""
    for_completion(app.backend)
    publish_until_deadline(app)


def run_in_child(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a job in a process of a prefork pool, in that of a solo pool, or on a thread.

    Raises:
        Reject: Its result found no backend; the worker gives the job back.
    """
    try:
        return drop_frames(target(*args, **kwargs))
    except RetryDeadlineExceeded as error:
        raise Reject(str(error), requeue=True) from None


_ThreadPool: Any = ThreadPool


class ThreadJob(NamedTuple):
    """A job that waits for a thread, or runs on one."""

    #: Submits the job to the threads.
    submit: Callable[[], Any]
    #: Celery's request; None for a caller that is not Celery's worker.
    request: Any
    since_s: float


class OrdinaryThreads(_ThreadPool):  # type: ignore[misc]
    """Celery's pool of threads, whose results wait while their backend is away.

    With leases a broken connection brings back what has not begun, so that must not begin here.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Jobs that wait for a thread, or run on one, in order.
        self._jobs: dict[Future[Any], ThreadJob] = {}

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """Runs a job on a thread."""
        run = partial(self._run, target)
        submit = partial(super().on_apply, run, args, kwargs, callback, accept_callback, **options)
        return self._submit(ThreadJob(submit, getattr(callback, "__self__", None), monotonic()))

    def _submit(self, job: ThreadJob) -> Any:
        result = job.submit()
        self._jobs[result.f] = job
        result.f.add_done_callback(partial(self._on_done, job.request))
        return result

    def free(self) -> int:
        """How many threads have nothing to do."""
        return max(0, int(self.limit) - len(self._jobs))

    def oldest_s(self) -> float | None:
        """When the oldest job came that waits for a thread; None if none waits."""
        if len(self._jobs) <= self.limit:
            return None
        jobs = list(self._jobs.items())
        return next((job.since_s for future, job in jobs if not future.running()), None)

    def offer(self, before_s: float, give: Callable[[Sequence[Any]], Collection[Any]]) -> int:
        """Offers the jobs that came before a time; returns how many went.

        Args:
            before_s: The time, on the clock of `oldest_s`.
            give: Gives jobs to other workers, by their requests; returns those that went.
        """
        # No thread may begin one meanwhile. Those that run refuse.
        waiting = [job for future, job in list(self._jobs.items()) if future.cancel()]
        old = [job.request for job in waiting if job.since_s <= before_s and job.request]
        given: Collection[Any] = ()
        try:
            given = give(old)
        except AWAY_ERRORS:
            # Nobody knows which of them went. The next connection brings back the others.
            given = old
            raise
        finally:
            for job in waiting:
                if job.request not in given:
                    self._submit(job)
        return len(given)

    def flush(self) -> None:
        """The broker's connection is gone: drops what has not begun, it will come again."""
        for future in list(self._jobs):
            # Refused by those that run.
            future.cancel()

    def on_close(self) -> None:
        """Drops what has not begun; what runs is waited for when the pool stops."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def terminate_job(self, pid: int, signal: Any = None) -> None:  # noqa: ARG002
        """Kills nothing, as there is no killing of a thread."""
        logger.info("a job on a thread of pid %s was revoked: it runs on", pid)

    def _run(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for_completion(self.app.backend)
        return run_in_child(target, *args, **kwargs)

    def _on_done(self, request: Any, future: Future[Any]) -> None:
        """Ends a job whose tracer broke off as a pool of processes does: by `Request.on_failure`.

        That gives back what is rejected because its result found no backend. Celery's threads
        forget such a job, and with a lease, which a living worker never loses, so would the queue.
        """
        self._jobs.pop(future, None)
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        logger.error("a job ended without an outcome: %s", safe_repr(error))
        if not isinstance(request, Request):
            return
        plain = plain_info(error, error.__traceback__)
        try:
            request.on_failure(full_info(error, plain))
        except (Exception, RetryDeadlineExceeded):
            logger.exception("the failure of %s[%s] cannot be stored", request.name, request.id)
