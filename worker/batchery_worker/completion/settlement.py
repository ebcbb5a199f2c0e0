"""Settles every job: Celery's tracer completes it on a thread, or its device has committed it."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.functional import chunks
from celery.worker import state as worker_state
from kombu.utils.encoding import safe_repr

from batchery.errors import ItemFailed
from batchery.outcomes import Failed, Replace, RetryAfter
from batchery.protocol.pieces import tell_readers
from batchery.retry import RetryDeadlineExceeded, is_away
from batchery.tracebacks import error_text
from batchery_worker.batch import JobAnswer
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.commit.listeners import (
    CommittedJob,
    call_after,
    find_runtime_s,
    log_success,
)
from batchery_worker.completion.backend import for_completion, publish_until_deadline
from batchery_worker.completion.tracer import Completion, Tracer, is_fenced, raised
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.metrics import Metrics
from batchery_worker.plain_values import Encoded
from batchery_worker.request import give_back

logger = logging.getLogger("batchery.pool")

#: Exceptions that the tracer reports, and that are not failures.
NOT_FAILURES = (Retry, Ignore, Reject)

#: Maximum number of jobs that are settled together after their listeners were called: the others
#: need not wait for a slow listener.
MAX_NOTIFIED_JOBS = 32

#: Reasons of jobs that the device could have committed, and did not, by the kind of their outcome.
NO_RESULT = {
    Failed: "a failure",
    RetryAfter: "a retry",
    Replace: "a job that becomes another",
    Reject: "a rejected job",
    Ignore: "an ignored job",
}
NOT_COMMITTED = "a result that Redis did not take"


class Settlement:
    """Settles each job once, and knows how many are being completed.

    Its methods are called where the lock of the feed is held, and so is Celery's request.
    """

    def __init__(
        self,
        app: Celery,
        threads: int,
        metrics: Metrics,
        in_flight: InFlight,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Starts no thread yet.

        Args:
            app: The app of the tasks and the result backend.
            threads: Maximum number of jobs that are completed at a time.
            metrics: Counts how jobs end.
            in_flight: The jobs that are not settled.
            call_soon: Calls a function where the lock is held; from any thread.
        """
        self._app = app
        self._metrics = metrics
        self._in_flight = in_flight
        self._call_soon = call_soon
        self._tracer = Tracer(app)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="batchery-completion")
        #: Number of jobs that are being completed.
        self.pending = 0
        publish_until_deadline(app)

    # By Celery's tracer

    def fail(self, call: TaskCall, error: Exception) -> None:
        """Settles a job with a failure, because no device has answered it."""
        self.settle(call, Failed(error), None)

    def settle(self, call: TaskCall, computed: Any, info: Mapping[str, Any] | None) -> None:
        """Settles a job by Celery's tracer, unless it was discarded.

        Args:
            call: The job; in flight.
            computed: Its outcome.
            info: Facts of its batch; None if it was never in one.
        """
        if call.request.discarded:
            self._in_flight.remove(call)
            return
        call.request.batch = info
        self.pending += 1
        completion = Completion(task_id=call.task_id, call=call, computed=computed, info=info)
        self._threads.submit(self._complete, completion)

    def _complete(self, completion: Completion) -> None:
        """Runs the tracer, on a thread; then Celery's request is told."""
        call, name, metrics = completion.call, completion.call.task_name, self._metrics
        count: Callable[[], None] = _count_nothing
        try:
            if is_fenced(call):
                tell = partial(self.fenced, call)
            else:
                is_error, value = self._tracer.run(completion)
                error = raised(value) if is_error else None
                if not isinstance(error, NOT_FAILURES):
                    tell_readers(self._app.backend, call.task_id, call.message)
                if error is None:
                    count = partial(metrics.job_ended, name, "succeeded")
                elif not isinstance(error, NOT_FAILURES):
                    count = partial(metrics.job_failed, name, type(error).__name__)
                runtime_s = find_runtime_s(completion.info)
                tell = partial(call.request.on_success, (is_error, value, runtime_s))
        except RetryDeadlineExceeded as away:
            _log_broken(call, away)
            tell = partial(give_back, call.request)
        except BaseException as broken:  # noqa: BLE001 - after any error the job must be settled
            _log_broken(call, broken)
            failed = completion.outcome
            cause = failed.exception if isinstance(failed, Failed) else broken
            tell = partial(_fail, call, cause)
            count = partial(metrics.job_failed, name, type(broken).__name__)
        self._call_soon(partial(self._end, call, tell, count))

    def _end(self, call: TaskCall, tell: Callable[[], None], count: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            if not is_away(error):
                # The result is stored. Without this the job would stay here for ever.
                worker_state.task_ready(call.request)
                call.request.acknowledge()
                raise
            # Celery's own code stores failures here. A lease of a living worker never ends by
            # itself, so the job must not stay with it.
            logger.warning("%s[%s] is given back: %r", call.task_name, call.task_id, error)
            give_back(call.request)
        finally:
            self._in_flight.remove(call)
            self.pending -= 1
            count()

    # By the device

    def settle_batch(
        self, answered: Iterable[tuple[TaskCall, JobAnswer, Mapping[str, Any]]]
    ) -> None:
        """Settles the jobs of a batch that a device has answered; each with its batch's facts."""
        listened: list[CommittedJob] = []
        for call, answer, info in answered:
            status = answer.status
            if status is CommitStatus.FENCED:
                self.fenced(call)
            elif status is CommitStatus.REVOKED:
                self._in_flight.remove(call)
                if not call.request.discarded:
                    _guarded(call.request.withdraw)
            elif status is not CommitStatus.COMMITTED:
                kind = NO_RESULT.get(type(answer.outcome), NOT_COMMITTED)
                self._metrics.tracer_jobs[call.tracer_reason or kind] += 1
                self.settle(call, answer.outcome, info)
            else:
                outcome = answer.outcome
                value = outcome.value if isinstance(outcome, Encoded) else outcome
                job = CommittedJob(call, value, answer.text, info)
                if not answer.is_listened:
                    self._committed(job)
                elif not call.is_plain and call.request.discarded:
                    self._in_flight.remove(call)
                else:
                    listened.append(job)
        self.pending += len(listened)
        for some in chunks(iter(listened), MAX_NOTIFIED_JOBS):
            self._threads.submit(self._notify_listeners, some)

    def _notify_listeners(self, jobs: list[CommittedJob]) -> None:
        """Calls what listens to jobs of one task, on a thread; then Celery's requests are told."""
        task = self._app.tasks[jobs[0].call.task_name]
        for_completion(task.backend)
        for job in jobs:
            try:
                call_after(task, job)
            except BaseException:
                # Whatever a hook raises, the job is done, and so must be its request.
                name, task_id = job.call.task_name, job.call.task_id
                logger.exception("what listens to %s[%s] has ended early", name, task_id)
        self._call_soon(partial(self._notified, jobs))

    def _notified(self, jobs: list[CommittedJob]) -> None:
        for job in jobs:
            self.pending -= 1
            self._committed(job, is_logged=True)

    def _committed(self, job: CommittedJob, *, is_logged: bool = False) -> None:
        """Settles a job whose result is stored already, and whose message is acknowledged."""
        call = job.call
        self._in_flight.remove(call)
        if lease := call.lease:
            lease.store.committed(lease.token)
        if not call.is_plain and call.request.discarded:
            return
        self._metrics.committed_jobs += 1
        runtime_s = find_runtime_s(job.info)
        if job.text is not None and not is_logged:
            log_success(job)
        if not call.is_plain:
            # Celery's own code runs next, and must not acknowledge again.
            call.request.acknowledged = True
            call.request.batch = job.info
            _guarded(partial(call.request.on_success, (False, job.shown, runtime_s)))
            return
        worker_state.total_count[call.task_name] += 1
        if call.send is not None:
            fields = {"result": job.shown, "runtime": runtime_s, "batch": job.info}
            call.send("task-succeeded", uuid=call.task_id, **fields)

    def fenced(self, call: TaskCall) -> None:
        """Drops a job that another worker has now."""
        self._in_flight.remove(call)
        if lease := call.lease:
            lease.store.lost([lease.token])
        if not call.is_plain:
            if call.request.discarded:
                return
            call.request.acknowledged = True
            worker_state.task_ready(call.request)
        self._metrics.fenced_jobs += 1
        self._metrics.job_ended(call.task_name, "fenced")

    def stop(self) -> None:
        """Waits for the jobs that are being completed."""
        self._threads.shutdown()


def _count_nothing() -> None:
    pass


def _log_broken(call: TaskCall, error: BaseException) -> None:
    text = safe_repr(error)
    logger.error("%s[%s] cannot be completed: %s", call.task_name, call.task_id, text)


def _fail(call: TaskCall, error: BaseException) -> None:
    """Has Celery's request store a failure, with no more than class and text of what was raised."""
    try:
        raise ItemFailed(f"{type(error).__name__}: {error_text(error)}")
    except ItemFailed:
        call.request.on_failure(ExceptionInfo())


def _guarded(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        # The other jobs of the batch must be settled, too.
        logger.exception("settling a job failed")
