"""Completes one job by Celery's own tracer, with the outcome that a device has computed.

The tracer stores the result, calls the hooks, sends the signals, publishes callbacks and the next
step of a chain, and counts chord parts. All of that is Celery's own code. Here the task computes
nothing: it takes its outcome from the completion that is current while the tracer runs.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from time import monotonic
from traceback import walk_stack, walk_tb
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import redis
from billiard.einfo import (  # type: ignore[attr-defined]
    ExceptionInfo,
    ExceptionWithTraceback,
    RemoteTraceback,
)
from celery import Celery, signals
from celery.app import trace
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    TimeLimitExceeded,
)

from batchery.completion import JobCompletion, Outbox, completing, current_completion
from batchery.errors import BatcheryError, ItemFailed
from batchery.outcomes import Failed, Replace, RetryAfter
from batchery.tracebacks import collect_frames, copy_exception, error_text, with_frames
from batchery_worker.commit.eligibility import task_needs_tracer
from batchery_worker.commit.listeners import ListenedJob, Listeners, leave
from batchery_worker.completion.atomic_finish import WithheldJob
from batchery_worker.completion.backend import for_completion, outage_told_apart
from batchery_worker.in_flight import TaskCall
from batchery_worker.plain_values import Encoded

#: Outcomes that Celery handles in ways of its own, so nothing is held back for them.
NEVER_HELD = (Failed, Replace, Ignore, Reject)


@dataclass(slots=True, kw_only=True)
class Completion(JobCompletion):
    """The completion of one job, from its outcome to its end."""

    call: TaskCall
    #: What was computed for the job: one of `batchery.outcomes`, or a value, perhaps encoded.
    computed: Any
    #: Called at the end, on the pool's thread, with this and the class of the job's error, if it
    #: failed. It holds no completion itself: that would be a circle.
    on_end: Callable[["Completion", str | None], None]
    #: Whether the job's messages and result may be held back.
    may_hold: bool
    #: The tracer's answer: whether the job failed, and its result.
    traced: Any = None
    #: Whether it has succeeded; neither a failure nor a success is, for example, a retry.
    succeeded: bool = False
    #: Whether the function has said that the item fails, and nothing was raised.
    is_announced: bool = False
    #: The job whose messages and result are held back; None if everything is written.
    held: WithheldJob | None = None


class Tracer:
    """Runs Celery's tracer, on whichever thread asks for it."""

    def __init__(self, app: Celery, listeners: Listeners) -> None:
        self._app = app
        self._find_tracer_reason = cache(partial(task_needs_tracer, app))
        self._listeners = listeners
        trace.send_prerun = _send_prerun_once
        log_each_traceback_once()
        #: Our tracer of each task; Celery makes new ones after each reconnect to the broker.
        self._tracers: dict[str, Any] = {}

    def may_hold(self, call: TaskCall) -> bool:
        """Whether a job's messages and result may be held back, to be written in one step.

        They may if nobody reads them before all are written.
        """
        request, lease = call.request, call.lease
        if request is None or lease is None:
            return False
        if call.publish_tag is None:
            return False
        task: Any = self._app.tasks[call.task_name]
        # Listeners may look for the result of their job.
        return self._find_tracer_reason(task) is None and not self._listeners.of(task).after

    def run(self, completion: Completion) -> None:
        """Completes a job; its messages and result may then be held back in `completion.held`.

        Raises:
            BaseException: It cannot be completed, for instance with `RetryDeadlineExceeded`.
        """
        listened = completion.call.listened
        if listened is None:
            self._run(completion)
        else:
            # In the context of what was called before the batch left.
            try:
                listened.context.run(self._run, completion)
            finally:
                listened.context.run(leave, listened)

    def _run(self, completion: Completion) -> None:
        call = completion.call
        # It tells outages apart, and sends nothing twice.
        for_completion(self._app.tasks[call.task_name].backend)
        self._time_device(call)
        completion.outcome = own_outcome(completion.computed)
        completion.is_answered = False
        completion.is_announced = is_announced(completion.outcome)
        completion.outbox = outbox = self._open_outbox(call)
        with completing(completion):
            if outbox is None:
                _call(completion)
                return
            outbox.holds = completion.may_hold and not isinstance(completion.outcome, NEVER_HELD)
            try:
                self._trace(completion, outbox)
            finally:
                _note_dedupe_keys(call, outbox)

    def replay(self, completion: Completion) -> None:
        """Writes now, step by step, what was held back.

        Raises:
            BaseException: As `run`.
        """
        assert completion.held is not None
        outbox, completion.held = completion.held.outbox, None
        try:
            with completing(JobCompletion(outbox=outbox)):
                self._write(completion.call, outbox)
        finally:
            _note_dedupe_keys(completion.call, outbox)

    def _trace(self, completion: Completion, outbox: Outbox) -> None:
        _call(completion)
        call = completion.call
        if not outbox.holds:
            return
        is_error, value = completion.traced
        if call.lease is None or (is_error and not isinstance(raised(value), Retry)):
            # A failure after all: the result cannot be encoded, or no retries are left.
            self._write(call, outbox)
        else:
            completion.held = WithheldJob(call.lease, outbox)

    def _write(self, call: TaskCall, outbox: Outbox) -> None:
        with outage_told_apart(for_completion(self._app.tasks[call.task_name].backend)):
            outbox.replay()

    def _open_outbox(self, call: TaskCall) -> Outbox | None:
        """Makes the outbox of a job; None if its message has no lease, or no tag."""
        lease, tag = call.lease, call.publish_tag
        if lease is None or tag is None:
            return None
        known = {"job": call.task_id, "next": call.request.embed if call.request else None}
        return Outbox(tag, known, (lease.store, lease.token), task_id=call.task_id)

    def _time_device(self, call: TaskCall) -> None:
        """Gives the task a tracer whose clock counts the device's time as the task's run time."""
        task: Any = self._app.tasks[call.task_name]
        if task.__trace__ is None or task.__trace__ is not self._tracers.get(task.name):
            with _before_start_once(task):
                tracer = trace.build_tracer(
                    task.name,
                    task,
                    app=self._app,
                    hostname=call.message.get("hostname"),
                    monotonic=tracer_clock,
                    Info=OutcomeInfo,
                )
            self._tracers[task.name] = task.__trace__ = tracer


def _call(completion: Completion) -> None:
    is_error, value = drop_frames(completion.call.target(*completion.call.args))[:2]
    if is_error:
        # A copy of the traceback, for another process. Celery reads its text here.
        value.tb = None
    completion.traced = is_error, value
    # An exception has frames that hold the completion.
    completion.outcome = None


class OutcomeInfo(trace.TraceInfo):
    """Celery's report of how a job ended; a failure that its function returned was expected."""

    __slots__ = ()

    def _log_error(self, task: Any, req: Any, einfo: Any) -> None:
        completion = current_completion()
        if isinstance(completion, Completion) and completion.is_announced:
            task = SimpleNamespace(name=task.name, throws=(BaseException,))
        super()._log_error(task, req, einfo)  # type: ignore[misc]


def own_outcome(computed: Any) -> Any:
    """The outcome of one job alone: what raises an exception also changes it.

    It shows where it was raised by frames that hold nothing.
    """
    if isinstance(computed, Encoded):
        return computed.value
    if isinstance(computed, RetryAfter) and isinstance(computed.error, Exception):
        return replace(computed, error=copy_exception(computed.error))
    if not isinstance(computed, Failed):
        return computed
    error = copy_exception(computed.exception)
    try:
        # Its own code may be broken, which Celery's backend asks for them.
        _ = error.args
    except Exception:  # noqa: BLE001
        error = ItemFailed(f"{type(error).__name__}: {error_text(error)}")
    with_frames(error, computed.frames or collect_frames(computed.exception))
    if error.__traceback__ is None and computed.traceback:
        # Also where the class refuses attributes: a frozen dataclass does.
        cause = RemoteTraceback(str(computed.traceback))
        BaseException.__setattr__(error, "__cause__", cause)
    return replace(computed, error=error)


def is_announced(outcome: Any) -> bool:
    """Whether an outcome is a `Failed` that the function has returned, instead of an error."""
    if not isinstance(outcome, Failed) or outcome.traceback:
        return False
    ours = BatcheryError, SoftTimeLimitExceeded, TimeLimitExceeded
    return type(outcome.exception) is ItemFailed or not isinstance(outcome.exception, ours)


class TracebackFilter(logging.Filter):
    """Leaves out of Celery's line of a failed job a traceback that its batch has logged before.

    One fault of a function, such as a wrong number of outcomes, may fail each job of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        #: Batch id and traceback of the last failure, and the first job that was logged with both.
        self._last: tuple[Any, str] = (None, "")

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by `logging`; keeps each record."""
        completion, context = current_completion(), cast(Any, record.args)
        is_failure = record.exc_info and isinstance(context, dict) and "traceback" in context
        if is_failure and isinstance(completion, Completion) and completion.info is not None:
            with self._lock:
                key = (completion.info["id"], context["traceback"])
                if key != self._last[0]:
                    self._last = (key, completion.task_id)
                first = self._last[1]
            if first != completion.task_id:
                record.exc_info = None
                record.msg = f"{record.msg}; the traceback is that of %(first)s, in the same batch"
                record.args = {**context, "first": first}
        return True


def log_each_traceback_once() -> None:
    """Puts a filter before Celery's log of failed jobs, in the place of an earlier worker's."""
    stock = logging.getLogger(trace.__name__)
    stock.filters[:] = [each for each in stock.filters if not isinstance(each, TracebackFilter)]
    stock.addFilter(TracebackFilter())


def _begun(task_id: str) -> ListenedJob | None:
    """What listens to a job, if the part that comes before the task was called already."""
    completion = current_completion()
    if not isinstance(completion, Completion) or completion.task_id != task_id:
        return None
    listened: ListenedJob | None = completion.call.listened
    return listened


def _send_prerun_once(*, task_id: str, task: Any, **named: Any) -> list[Any]:
    """In the tracer's place of `task_prerun.send`: not for a job whose receivers were called.

    What these, or `before_start`, have put on the job's request goes over to the tracer's.
    """
    listened = _begun(task_id)
    if listened is None:
        return signals.task_prerun.send(task_id=task_id, task=task, **named)
    request = vars(task.request)
    request.update(vars(listened.request) | request)
    return []


@contextmanager
def _before_start_once(task: Any) -> Iterator[None]:
    """Lets a tracer that is built in the block call `before_start` only if nobody has."""
    stock, own = task.before_start, dict(vars(task))

    def before_start(task_id: str, *args: Any) -> Any:
        listened = _begun(task_id)
        if listened is None:
            return stock(task_id, *args)
        if listened.error is not None:
            raise listened.error
        return None

    # The tracer takes the method from the task when it is built.
    task.before_start = before_start
    try:
        yield
    finally:
        del task.before_start
        vars(task).update(own)


def tracer_clock() -> float:
    """The tracer's clock: it jumps by the device's time when the task answers."""
    completion = current_completion()
    if completion is None or not completion.is_answered:
        return monotonic()
    info: Mapping[str, Any] = completion.info or {}
    return monotonic() + float(info.get("forward_ms", 0.0)) / 1e3


def is_fenced(call: TaskCall) -> bool:
    """Asks Redis whether another worker has the job, just before its result is stored.

    Another worker may still take it after that. If Redis does not answer, the job counts as ours:
    in the worst case its result is stored twice.
    """
    lease = call.lease
    if lease is None:
        return False
    try:
        return lease.token not in lease.store.still_held([lease.token])
    except (redis.RedisError, OSError):
        return False


def raised(info: ExceptionInfo) -> Any:
    """The exception that the tracer reports, without the wrapper that billiard puts around it."""
    error = info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def plain_info(error: BaseException, trace: TracebackType | None) -> ExceptionInfo:
    """A failure with no more than the class and the text of an exception whose own code raises."""
    plain = ItemFailed(f"{type(error).__name__}: {error_text(error)}")
    return ExceptionInfo((ItemFailed, plain, trace))


def full_info(error: BaseException, plain: ExceptionInfo) -> ExceptionInfo:
    """A failure with all of an exception; `plain` if its code, or its causes', raises."""
    with suppress(Exception):
        return ExceptionInfo((type(error), error, error.__traceback__))
    return plain


def drop_frames(traced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Takes its frames from the exception of a job that did not succeed.

    Celery clears some of them, while its own still run. Those hold the exception and a copy of its
    traceback, and it holds them: a circle of 0.3 MB, and of so few objects that Python's collector
    lets a thousand of them pile up.

    Returns:
        The same.
    """
    if traced[0] and isinstance(traced[1], ExceptionInfo):
        error = raised(traced[1])
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        # One that refuses attributes takes this, too.
        error.with_traceback(None)
        # The job's own exception is another one where that cannot be pickled.
        outer = walk_stack(frames[0].f_back) if frames and frames[0].f_back else ()
        for frame in [*frames, *(frame for frame, _ in outer)]:
            with suppress(RuntimeError):  # It still runs.
                frame.clear()
                # Billiard has looked at these, and so Python keeps them, until the next look.
                _ = frame.f_locals
    return traced


def _note_dedupe_keys(call: TaskCall, outbox: Outbox) -> None:
    lease = call.lease
    if lease is not None and outbox.has_dedupe_keys:
        lease.store.published(lease.token, outbox.publish_tag)
