"""Settles every job: a thread completes its outcome, then Celery is told where the lock is held."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery import Celery
from celery.utils.functional import chunks
from celery.worker import state as worker_state

from batchery.outcomes import Failed, Ignore, Reject, Replace, RetryAfter
from batchery_worker.batch import JobAnswer
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.commit.listeners import Listeners, log_success
from batchery_worker.completion.executor import CommittedJob, CompletionExecutor
from batchery_worker.completion.tracer import Completion
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.metrics import Metrics
from batchery_worker.plain_values import Encoded

logger = logging.getLogger("batchery.pool")

#: A job that a device has answered, and the facts of its batch.
Answered = tuple[TaskCall, JobAnswer, Mapping[str, Any]]

#: Maximum number of jobs that are settled together after their listeners were called: the others
#: need not wait for a slow listener.
MAX_NOTIFIED_JOBS = 32

#: Text in events and in the log for a result that is not known any more.
UNKNOWN_RESULT = "..."

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
    """Settles each job once, and knows how many are being completed."""

    def __init__(
        self,
        app: Celery,
        threads: int,
        metrics: Metrics,
        in_flight: InFlight,
        listeners: Listeners,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._app = app
        self._listeners = listeners
        self._executor = CompletionExecutor(app, threads, self.deliver, self.fenced, listeners)
        self._metrics = metrics
        self._in_flight = in_flight
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: Guards `_called`.
        self._lock = threading.Lock()
        self._call_soon = call_soon
        self._called = False
        #: Number of jobs that are being completed.
        self.pending = 0
        #: Called when nothing is pending any more.
        self.on_idle: Callable[[], None] = lambda: None

    def deliver(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop's thread; from any thread."""
        self._mailbox.put(function)
        # One turn of the loop empties the whole mailbox. A turn costs as much as a job.
        with self._lock:
            if not self._called:
                self._called = True
                self._call_soon(self.empty_mailbox)

    def empty_mailbox(self) -> None:
        """Calls the functions that were delivered; on the loop's thread."""
        # Reset first: a function that arrives after the last look must schedule another turn.
        self._called = False
        with suppress(queue.Empty):
            while True:
                _run(self._mailbox.get_nowait())

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
        if call.request is not None:
            if call.request.discarded:
                self._in_flight.remove(call)
                return
            call.request.batch = info
        self.pending += 1
        completion = Completion(
            task_id=call.task_id,
            call=call,
            computed=computed,
            info=info,
            on_end=self._settled,
            may_hold=self._executor.tracer.may_hold(call),
        )
        self._executor.submit(completion)

    def settle_batch(self, answered: Iterable[Answered]) -> None:
        """Settles the jobs of a batch that a device has answered."""
        listened: list[CommittedJob] = []
        for call, answer, info in answered:
            status = answer.status
            if status is CommitStatus.FENCED:
                self.fenced(call)
            elif status is CommitStatus.REVOKED:
                self._withdraw(call)
            elif status is not CommitStatus.COMMITTED:
                kind = NO_RESULT.get(type(answer.outcome), NOT_COMMITTED)
                self._metrics.tracer_jobs[call.tracer_reason or kind] += 1
                self.settle(call, answer.outcome, info)
            elif call.is_plain and answer.text is None and not answer.is_listened:
                self._committed_plain(call)
            else:
                text = UNKNOWN_RESULT if answer.text is None else answer.text
                outcome = answer.outcome
                value = outcome.value if isinstance(outcome, Encoded) else outcome
                job = CommittedJob(call, text, info["forward_ms"] / 1e3, value, info)
                self._settle_committed(job, listened if answer.is_listened else None)
        self._notify_listeners(listened)

    def _settle_committed(self, job: CommittedJob, listened: list[CommittedJob] | None) -> None:
        """Settles a committed job, or adds it to those that something listens to."""
        if not job.call.is_plain and (job.call.request is None or job.call.request.discarded):
            self._in_flight.remove(job.call)
        elif listened is not None:
            listened.append(job)
        else:
            log_success(job.call, job.text, job.runtime_s)
            self.committed(job)

    def _notify_listeners(self, jobs: Sequence[CommittedJob]) -> None:
        """Settles committed jobs as soon as what listens to them was called, on a thread."""
        self.pending += len(jobs)
        for some in chunks(iter(jobs), MAX_NOTIFIED_JOBS):
            self._executor.notify_listeners(some, self._completed)

    def _completed(self, jobs: Sequence[CommittedJob]) -> None:
        for job in jobs:
            self._end_one()
            self.committed(job)

    def committed(self, job: CommittedJob) -> None:
        """Settles a job whose result is stored already, and whose message is acknowledged."""
        call, text, runtime_s = job.call, job.text, job.runtime_s
        if call.is_plain:
            self._committed_plain(call)
            if call.send is not None:
                fields = {} if job.info is None else {"batch": job.info}
                call.send(
                    "task-succeeded", uuid=call.task_id, result=text, runtime=runtime_s, **fields
                )
            return
        self._in_flight.remove(call)
        request = call.request
        if request is None or request.discarded:
            return
        self._metrics.committed_jobs += 1
        if lease := request.lease:
            lease.store.committed([lease.token])
        # Celery's own code runs next, and must not acknowledge again.
        request.acknowledged = True
        request.batch = job.info
        _run(partial(call.callback, (False, text, runtime_s)))

    def _committed_plain(self, call: TaskCall) -> None:
        self._in_flight.remove(call)
        self._metrics.committed_jobs += 1
        if lease := call.lease:
            lease.store.committed([lease.token])
        worker_state.total_count[call.task_name] += 1

    def fenced(self, call: TaskCall) -> None:
        """Drops a job that another worker has now."""
        self._in_flight.remove(call)
        if call.is_plain:
            if lease := call.lease:
                lease.store.lost([lease.token])
        else:
            request = call.request
            if request is None or request.discarded:
                return
            if lease := request.lease:
                lease.store.lost([lease.token])
            request.acknowledged = True
            worker_state.task_ready(request)
        self._metrics.fenced_jobs += 1
        self._metrics.job_ended(call.task_name, "fenced")

    def _withdraw(self, call: TaskCall) -> None:
        self._in_flight.remove(call)
        if call.request is not None and not call.request.discarded:
            _run(call.request.withdraw)

    def stop(self) -> None:
        """Waits for the jobs that are being completed."""
        self._executor.stop()
        self.empty_mailbox()

    def _end_one(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.on_idle()

    def _settled(self, completion: Completion, failure: str | None) -> None:
        call = completion.call
        self._in_flight.remove(call)
        self._end_one()
        if failure is not None:
            self._metrics.job_failed(call.task_name, failure)
        elif completion.succeeded:
            self._metrics.job_ended(call.task_name, "succeeded")


def _run(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        # An OSError that gets out would make Celery reconnect to the broker for nothing.
        logger.exception("settling a job failed")
