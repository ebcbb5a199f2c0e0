"""Settles every job: a thread completes its outcome, then Celery is told on the event loop."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import redis
from celery import Celery
from celery.app import trace
from celery.worker import state as worker_state
from kombu.utils.encoding import safe_repr

from batchery.outcomes import Failed
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.completion.executor import CompletionExecutor
from batchery_worker.completion.tracer import Completion
from batchery_worker.event_loop import begin_next_turn
from batchery_worker.in_flight import InFlight
from batchery_worker.ipc.messages import decode_outcome
from batchery_worker.job import Job
from batchery_worker.metrics import Metrics
from batchery_worker.request import lease_store_of
from batchery_worker.task_call import DispatchedBatch, TaskCall

logger = logging.getLogger("batchery.pool")

#: Text in events and in the log for a result that is not known any more.
UNKNOWN_RESULT = "..."

#: Reason of a job that the device could have committed, and did not.
NOT_COMMITTED = "an outcome that is no result, or a result that Redis did not take"


class Settlement:
    """Settles each job once, and knows how many are being completed."""

    def __init__(
        self, app: Celery, threads: int, metrics: Metrics, in_flight: InFlight, hub: Any
    ) -> None:
        self._executor = CompletionExecutor(app, threads, self.deliver, self.fenced)
        self._metrics = metrics
        self._in_flight = in_flight
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards `_hub` and `_called`: no thread may schedule on a hub that was just left.
        self._lock = threading.Lock()
        self._hub = hub
        self._called = False
        #: Number of jobs that are being completed.
        self.pending = 0

    def attach(self, hub: Any) -> None:
        """Moves to another event loop."""
        with self._lock:
            self._hub = hub
            self._called = True
            hub.call_soon(self.empty_mailbox)

    def deliver(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop's thread; from any thread."""
        self._mailbox.put(function)
        # One turn of the loop empties the whole mailbox. A turn costs as much as a job.
        with self._lock:
            if not self._called:
                self._called = True
                self._hub.call_soon(self.empty_mailbox)

    def empty_mailbox(self) -> None:
        """Calls the functions that were delivered; on the loop's thread."""
        # Reset first: a function that arrives after the last look must schedule another turn.
        self._called = False
        ran = False
        while True:
            try:
                function = self._mailbox.get_nowait()
            except queue.Empty:
                break
            _run(function)
            ran = True
        if ran:
            # Celery may have put calls of its own on the loop: acknowledgements, for instance.
            begin_next_turn(self._hub)

    def finish(self) -> None:
        """Waits until no job is being completed; blocks the loop's thread."""
        while self.pending:
            _run(self._mailbox.get())

    def tell_started(self, call: TaskCall, pid: int) -> None:
        """Stores the state STARTED for a job; `pid` is the process that runs it."""
        self._executor.tell_started(call, pid)

    def fail(self, call: TaskCall, error: Exception) -> None:
        """Settles a job with a failure, because no device has answered it."""
        self.settle(call, lambda _: Failed(error), None)

    def settle(
        self, call: TaskCall, outcome: Callable[[Any], Any], facts: Mapping[str, Any] | None
    ) -> None:
        """Settles a job by Celery's tracer, unless it was discarded.

        Args:
            call: The job; in flight.
            outcome: Makes the outcome, given the backend; called on a completion thread.
            facts: Facts of its batch; None if it was never in one.
        """
        if call.request is not None:
            if call.request.discarded:
                self._in_flight.remove(call)
                return
            call.request.batch = facts
        self.pending += 1
        self._executor.submit(
            Completion(
                task_id=call.task_id,
                call=call,
                make_outcome=outcome,
                facts=facts,
                on_end=partial(self._settled, call),
                may_hold=self._executor.tracer.may_hold(call),
            )
        )

    def settle_answered(
        self, call: TaskCall, status: str, rest: Sequence[Any], facts: Mapping[str, Any]
    ) -> None:
        """Settles a job that a device has answered.

        Args:
            call: The job; in flight.
            status: Its `CommitStatus`.
            rest: The rest of its entry in `Done.jobs`.
            facts: Facts of its batch.
        """
        if status == CommitStatus.COMMITTED:
            self.committed(
                call, rest[0] if rest else UNKNOWN_RESULT, facts["forward_ms"] / 1e3, facts
            )
        elif status == CommitStatus.FENCED:
            self.fenced(call)
        else:
            self._metrics.tracer_jobs[call.tracer_reason or NOT_COMMITTED] += 1
            self.settle(call, partial(decode_outcome, rest), facts)

    def committed(
        self,
        call: TaskCall,
        text: str,
        runtime_s: float,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Settles a job whose result is stored already, and whose message is acknowledged.

        Args:
            call: The job; in flight.
            text: Its result as text, for events and the log.
            runtime_s: How long it ran, in seconds.
            facts: Facts of its batch; None if they are not known any more.
        """
        self._in_flight.remove(call)
        request = call.request
        if request is None or request.discarded:
            return
        self._metrics.committed_jobs += 1
        if lease := request.lease:
            lease.store.committed([lease.token])
        # Celery's own code runs next, and must not acknowledge again.
        request.acknowledged = True
        request.batch = facts
        log_success(call, text, runtime_s)
        _run(partial(call.callback, (False, text, runtime_s)))

    def left_by(self, dispatched: DispatchedBatch) -> list[Job[TaskCall]]:
        """Settles the jobs that a device had committed before it died; returns the others.

        Waits for one answer of Redis. Without an answer it returns all jobs: those that were
        committed run again, and Redis refuses their second result.
        """
        jobs = list(dispatched.batch.jobs)
        leases = [job.payload.lease for job in jobs]
        lease_store = lease_store_of(leases)
        if lease_store is None:
            return jobs
        try:
            held = lease_store.still_held([lease.token for lease in leases if lease is not None])
        except (redis.RedisError, OSError) as error:
            logger.warning("cannot ask Redis which jobs the device had committed: %s", error)
            return jobs
        left = []
        for job, lease in zip(jobs, leases, strict=True):
            if lease is None or lease.store is not lease_store or lease.token in held:
                left.append(job)
            elif lease_store.holds(lease.token):
                self.committed(job.payload, UNKNOWN_RESULT, monotonic() - dispatched.dispatched_s)
            else:
                self.fenced(job.payload)
        return left

    def fenced(self, call: TaskCall) -> None:
        """Drops a job that another worker has now."""
        self._in_flight.remove(call)
        request = call.request
        if request is None or request.discarded:
            return
        if lease := request.lease:
            lease.store.lost([lease.token])
        request.acknowledged = True
        worker_state.task_ready(request)
        self._metrics.fenced_jobs += 1

    def stop(self) -> None:
        """Waits for the jobs that are being completed."""
        self._executor.stop()
        self.empty_mailbox()

    def _settled(self, call: TaskCall, failed: bool) -> None:
        self._in_flight.remove(call)
        self.pending -= 1
        self._metrics.failed_jobs += failed


def log_success(call: TaskCall, text: str, runtime_s: float) -> None:
    """Logs a success in the words of Celery's tracer."""
    if trace.logger.isEnabledFor(logging.INFO):
        message = call.message
        context = {
            "id": call.task_id,
            "name": message.get("shadow") or call.task_name,
            "return_value": text,
            "runtime": runtime_s,
            "args": message.get("argsrepr") or safe_repr(message.get("args")),
            "kwargs": message.get("kwargsrepr") or safe_repr(message.get("kwargs")),
        }
        trace.info(trace.LOG_SUCCESS, context)


def _run(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        # An OSError that gets out would make Celery reconnect to the broker for nothing.
        logger.exception("settling a job failed")
