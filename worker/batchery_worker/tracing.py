"""One job through Celery's own tracer, with the outcome that a device has computed.

The tracer stores the result, calls the hooks, sends the signals, publishes callbacks and the next
step of a chain, and counts chord parts: all of it Celery's own code. The task answers at once, from
the context that is set around it here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import redis
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback  # type: ignore[attr-defined]
from celery import Celery
from celery.app import trace
from celery.exceptions import Ignore, Reject, Retry

from batchery.outcome import Failed, Replace
from batchery.task import Computed, computed
from batchery.transport.sending import Sending, sending_once
from batchery_worker.capture import Capture, capturing, make_capturable
from batchery_worker.chords import share_claims
from batchery_worker.finish import Finish
from batchery_worker.job_facts import tag_results, tagging, tracer_clock
from batchery_worker.needs import TracerNeeds
from batchery_worker.patience import Patience, make_patient, patient
from batchery_worker.request import Lease
from batchery_worker.ticket import Ticket

#: Outcomes after which Celery has its own ways to go on.
NO_VALUES = (Failed, Replace, Ignore, Reject)


@dataclass(slots=True)
class Job:
    """A job that is to be completed."""

    ticket: Ticket
    outcome: Callable[[Any], Any]
    facts: Mapping[str, Any] | None
    settled: Callable[[bool], None]
    #: Whether what is written for it may be held back.
    may_wait: bool
    #: What the tracer said, and what it would have written.
    answer: Any = None
    finish: Finish | None = None


class Tracing:
    """Runs the tracer, on whichever thread asks for it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._needs = TracerNeeds(app)
        #: By name of the task; Celery makes new ones after each reconnect to the broker.
        self._tracers: dict[str, Any] = {}

    def may_wait(self, ticket: Ticket) -> bool:
        """Whether nobody looks at what is written for a job before all of it is done.

        The parts of a chord are counted by what is stored.
        """
        request, lease = ticket.request, ticket.lease
        if request is None or lease is None or (request.embed or {}).get("chord"):
            return False
        if not self._one_broker or _tag_of(ticket) is None:
            return False
        task: Any = self._app.tasks[ticket.task_name]
        return self._needs.why_all(task) is None

    @cached_property
    def _one_broker(self) -> bool:
        """Whether messages go where they come from."""
        conf = self._app.conf
        return bool(conf.broker_write_url == conf.broker_read_url)

    def run(self, job: Job) -> None:
        """Completes a job; what was to be written for it may be held back in `job.finish`.

        Raises:
            BaseException: It cannot be completed, `RanOut` among others.
        """
        backend = self._backend()
        self._time_device(job.ticket)
        outcome = job.outcome(backend)
        holds_back = job.may_wait and not isinstance(outcome, NO_VALUES)
        try:
            computed.set(Computed(job.ticket.task_id, outcome))
            with tagging(job.facts), patient(Patience()):
                self._trace(job, holds_back=holds_back)
        finally:
            computed.set(None)

    def replay(self, job: Job) -> None:
        """Writes what was held back, as if it had not been.

        Raises:
            BaseException: As `run`.
        """
        assert job.finish is not None
        lease, capture = job.finish.lease, job.finish.capture
        job.finish = None
        try:
            with patient(Patience()):
                capture.replay()
        finally:
            _note_marks(lease, capture.sending)

    def _trace(self, job: Job, *, holds_back: bool) -> None:
        """Has messages sent once: a worker may die before it is done."""
        ticket, lease = job.ticket, job.ticket.lease
        if lease is None:
            job.answer = ticket.target(*ticket.args)[:2]
            return
        here = lease if self._one_broker else None
        with sending_once(_tag_of(ticket), _known(ticket), here) as sending:
            try:
                capture = Capture(ticket.task_id, sending) if sending and holds_back else None
                with capturing(capture):
                    job.answer = ticket.target(*ticket.args)[:2]
                if capture is None or sending is None:
                    return
                is_error, value = job.answer
                if is_error and not isinstance(raised(value), Retry):
                    # A result that cannot be encoded, or no retries left.
                    capture.replay()
                else:
                    job.finish = Finish(ticket.task_id, lease, sending.publish_tag, capture)
            finally:
                _note_marks(lease, sending)

    def _backend(self) -> Any:
        """This thread's own, that waits, tells of batches, and can be held back."""
        backend = self._app.backend
        tag_results(backend)
        make_patient(backend)
        share_claims(backend)
        make_capturable(backend)
        return backend

    def _time_device(self, ticket: Ticket) -> None:
        """Gives the task a tracer that counts the device's time as the task's run time."""
        task: Any = self._app.tasks[ticket.task_name]
        if task.__trace__ is None or task.__trace__ is not self._tracers.get(task.name):
            tracer = trace.build_tracer(
                task.name,
                task,
                app=self._app,
                hostname=ticket.message.get("hostname"),
                monotonic=tracer_clock,
            )
            self._tracers[task.name] = task.__trace__ = tracer


def _tag_of(ticket: Ticket) -> str | None:
    """The tag of a job's message, the same each time it is delivered; None for other transports."""
    if ticket.request is None:
        return None
    tag: str | None = ticket.request.message.properties.get("publish_tag")
    return tag


def is_fenced(ticket: Ticket) -> bool:
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


def raised(info: ExceptionInfo) -> Any:
    """The exception that the tracer reports; billiard wraps it together with its traceback."""
    error = info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def _known(ticket: Ticket) -> Mapping[str, Any]:
    return {"job": ticket.task_id, "next": ticket.request.embed if ticket.request else None}


def _note_marks(lease: Lease, sending: Sending | None) -> None:
    if sending is not None and sending.is_marked:
        lease.ledger.sent(lease.token, sending.publish_tag)
