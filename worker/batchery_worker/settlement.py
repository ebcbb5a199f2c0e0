"""The end of every job: its outcome is completed on a thread, then told to Celery on the loop."""

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

from batchery.outcome import Failed
from batchery_worker.accepted import Accepted
from batchery_worker.commit import Verdict
from batchery_worker.completion import Completion
from batchery_worker.metrics import Metrics
from batchery_worker.process import Flight
from batchery_worker.request import ledger_of
from batchery_worker.scheduler import Job
from batchery_worker.ticket import Ticket
from batchery_worker.wire import decode_outcome

logger = logging.getLogger("batchery.pool")

#: Stands for the result of a job of which nobody knows it any more; in events and in the log.
UNKNOWN = "..."

#: When the loop turns again after jobs were settled, in seconds; 0 would be in the same turn.
SOON_S = 0.001


class Settlement:
    """Settles each job once, and knows how many are on their way."""

    def __init__(
        self, app: Celery, threads: int, metrics: Metrics, accepted: Accepted, hub: Any
    ) -> None:
        self._completion = Completion(app, threads, self.deliver, self.fenced)
        self._metrics = metrics
        self._accepted = accepted
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Of the two below: a thread must not call on a loop that was left a moment ago.
        self._lock = threading.Lock()
        self._hub = hub
        self._called = False
        #: Jobs whose outcome is known, and whose result is being stored.
        self.pending = 0

    def attach(self, hub: Any) -> None:
        """Moves to another event loop."""
        with self._lock:
            self._hub = hub
            self._called = True
            hub.call_soon(self.empty_mailbox)

    def deliver(self, call: Callable[[], None]) -> None:
        """Runs something on the loop's thread; may be called from any thread."""
        self._mailbox.put(call)
        # One turn of the loop empties the whole mailbox; each turn costs as much as a job.
        with self._lock:
            if not self._called:
                self._called = True
                self._hub.call_soon(self.empty_mailbox)

    def empty_mailbox(self) -> None:
        """Runs what was delivered; on the loop's thread."""
        # Before the first look, so that what comes after the last one is called for again.
        self._called = False
        ran = False
        while True:
            try:
                call = self._mailbox.get_nowait()
            except queue.Empty:
                break
            _run(call)
            ran = True
        if ran:
            # Celery acknowledges in the loop's next turn, which an idle loop begins only when
            # something happens: without this, up to a second later.
            self._hub.call_later(SOON_S, _ignore)

    def finish(self) -> None:
        """Waits until no job is on its way; on the loop's thread, which is held up meanwhile."""
        while self.pending:
            _run(self._mailbox.get())

    def tell_started(self, ticket: Ticket, pid: int) -> None:
        """Has it stored that a job runs, in the process of that id."""
        self._completion.tell_started(ticket, pid)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Settles a job that no device has answered."""
        self.settle(ticket, lambda _: Failed(error), None)

    def settle(
        self, ticket: Ticket, outcome: Callable[[Any], Any], facts: Mapping[str, Any] | None
    ) -> None:
        """Settles a job, unless nobody wants its outcome any more.

        Args:
            ticket: The job; accepted.
            outcome: Makes the outcome, given the backend; called on a completion thread.
            facts: Of its batch, None if it never was in one.
        """
        if ticket.request is not None:
            if ticket.request.discarded:
                self._accepted.remove(ticket)
                return
            ticket.request.batch = facts
        self.pending += 1
        self._completion.submit(ticket, outcome, facts, partial(self._settled, ticket))

    def conclude(
        self, ticket: Ticket, verdict: str, rest: Sequence[Any], facts: Mapping[str, Any]
    ) -> None:
        """Settles a job that a device has answered.

        Args:
            ticket: The job; accepted.
            verdict: What became of it at the commit.
            rest: What is left to know of its outcome, as `Done.jobs` has it.
            facts: Of its batch.
        """
        if verdict == Verdict.COMMITTED:
            self.committed(ticket, rest[0] if rest else UNKNOWN, facts["forward_ms"] / 1e3, facts)
        elif verdict == Verdict.FENCED:
            self.fenced(ticket)
        else:
            self.settle(ticket, partial(decode_outcome, rest), facts)

    def committed(
        self,
        ticket: Ticket,
        text: str,
        runtime_s: float,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Settles a job whose result is stored already, and whose message is acknowledged.

        Args:
            ticket: The job; accepted.
            text: Its result, for an event and the log.
            runtime_s: How long it ran.
            facts: Of its batch; None where nobody knows them any more.
        """
        self._accepted.remove(ticket)
        request = ticket.request
        if request is None or request.discarded:
            return
        self._metrics.committed_jobs += 1
        if lease := request.lease:
            lease.ledger.settled([lease.token])
        # Celery's own code follows, which shall not acknowledge once more.
        request.acknowledged = True
        request.batch = facts
        log_success(ticket, text, runtime_s)
        _run(partial(ticket.callback, (False, text, runtime_s)))

    def left_by(self, flight: Flight) -> list[Job[Ticket]]:
        """Settles the jobs that a device had committed before it died; returns the others.

        Waits for one answer of Redis. Without it all jobs are left: those that were committed run
        once more, and their second result is refused.
        """
        jobs = list(flight.batch.jobs)
        leases = [job.payload.lease for job in jobs]
        ledger = ledger_of(leases)
        if ledger is None:
            return jobs
        try:
            held = ledger.still_held([lease.token for lease in leases if lease is not None])
        except (redis.RedisError, OSError) as error:
            logger.warning("nobody knows what the device had committed: %s", error)
            return jobs
        left = []
        for job, lease in zip(jobs, leases, strict=True):
            if lease is None or lease.ledger is not ledger or lease.token in held:
                left.append(job)
            elif ledger.holds(lease.token):
                self.committed(job.payload, UNKNOWN, monotonic() - flight.dispatched_s)
            else:
                self.fenced(job.payload)
        return left

    def fenced(self, ticket: Ticket) -> None:
        """Drops a job that another worker has now."""
        self._accepted.remove(ticket)
        request = ticket.request
        if request is None or request.discarded:
            return
        if lease := request.lease:
            lease.ledger.lost([lease.token])
        request.acknowledged = True
        worker_state.task_ready(request)
        self._metrics.fenced_jobs += 1

    def stop(self) -> None:
        """Waits for the jobs that are on their way."""
        self._completion.stop()
        self.empty_mailbox()

    def _settled(self, ticket: Ticket, failed: bool) -> None:
        self._accepted.remove(ticket)
        self.pending -= 1
        self._metrics.failed_jobs += failed


def log_success(ticket: Ticket, text: str, runtime_s: float) -> None:
    """Writes the line of the log that Celery's tracer writes."""
    if trace.logger.isEnabledFor(logging.INFO):
        message = ticket.message
        context = {
            "id": ticket.task_id,
            "name": message.get("shadow") or ticket.task_name,
            "return_value": text,
            "runtime": runtime_s,
            "args": message.get("argsrepr") or safe_repr(message.get("args")),
            "kwargs": message.get("kwargsrepr") or safe_repr(message.get("kwargs")),
        }
        trace.info(trace.LOG_SUCCESS, context)


def _ignore() -> None:
    """Turns the loop, and does nothing else."""


def _run(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        # An OSError from here would make Celery reconnect to a broker that is well.
        logger.exception("settling a job failed")
