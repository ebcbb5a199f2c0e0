"""Completes one job by Celery's own tracer, with the outcome that a device has computed.

The tracer stores the result, calls the hooks, sends the signals, publishes callbacks and the next
step of a chain, and counts chord parts. All of that is Celery's own code. Here the task computes
nothing: it takes its outcome from the completion that is current while the tracer runs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from traceback import walk_stack, walk_tb
from types import SimpleNamespace
from typing import Any

import redis
from billiard.einfo import (  # type: ignore[attr-defined]
    ExceptionInfo,
    ExceptionWithTraceback,
    RemoteTraceback,
)
from celery import Celery, signals
from celery.app import trace
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from batchery.completion import JobCompletion, completing, current_completion
from batchery.errors import BatcheryError, ItemFailed
from batchery.outcomes import Failed, RetryAfter
from batchery.tracebacks import collect_frames, copy_exception, error_text, with_frames
from batchery_worker.commit.listeners import ListenedJob, leave
from batchery_worker.completion.backend import for_completion
from batchery_worker.in_flight import TaskCall
from batchery_worker.plain_values import Encoded


@dataclass(slots=True, kw_only=True)
class Completion(JobCompletion):
    """The completion of one job, from its outcome to its end."""

    call: TaskCall
    #: What was computed for the job: one of `batchery.outcomes`, or a value, perhaps encoded.
    computed: Any
    #: Whether the function has said that the item fails, and nothing was raised.
    is_announced: bool = False


class Tracer:
    """Runs Celery's tracer, on whichever thread asks for it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        trace.send_prerun = _send_prerun_once
        #: By the name of the task.
        self._tracers: dict[str, Callable[..., Any]] = {}

    def run(self, completion: Completion) -> tuple[bool, Any]:
        """Completes a job.

        Returns:
            What Celery's request is told: whether it has not succeeded, and then billiard's
            `ExceptionInfo`, else the text of its result.

        Raises:
            BaseException: It cannot be completed, for instance with `RetryDeadlineExceeded`.
        """
        listened = completion.call.listened
        if listened is None:
            return self._run(completion)
        # In the context of what was called before the batch left.
        try:
            traced: tuple[bool, Any] = listened.context.run(self._run, completion)
        finally:
            listened.context.run(leave, listened)
        return traced

    def _run(self, completion: Completion) -> tuple[bool, Any]:
        call = completion.call
        request: Any = call.request
        task: Any = self._app.tasks[call.task_name]
        # It tells outages apart, and sends nothing twice.
        for_completion(task.backend)
        completion.lease = call.lease
        if call.lease is not None:
            completion.publish_tag = call.publish_tag
        completion.outcome = own_outcome(completion.computed)
        completion.is_announced = is_announced(completion.outcome)
        completion.is_answered = False
        headers = {**request.request_dict, "is_eager": False, **call.embed}
        with completing(completion):
            tracer = self._find_tracer(task, request)
            value, info, _, text = tracer(request.id, request.args, request.kwargs, headers)
        # An exception has frames that hold the completion.
        completion.outcome = None
        if info is None:
            return False, text
        drop_frames(value)
        # Events tell of it by its repr: a pool of processes loses billiard's wrapper on the way.
        value.exception = raised(value)
        return True, value

    def _find_tracer(self, task: Any, request: Any) -> Callable[..., Any]:
        """A tracer whose clock counts the device's time as the task's run time."""
        if (tracer := self._tracers.get(task.name)) is None:
            with _before_start_once(task):
                tracer = trace.build_tracer(
                    *(task.name, task),
                    app=self._app,
                    hostname=request.hostname,
                    monotonic=tracer_clock,
                    Info=OutcomeInfo,
                )
            self._tracers[task.name] = tracer
        return tracer


class OutcomeInfo(trace.TraceInfo):
    """Celery's report of how a job ended; one fault that fails a whole batch is shown once.

    A failure that the function has returned was expected, and has no traceback.
    """

    __slots__ = ()

    #: Guards the batch id and the traceback that were logged last.
    _lock = threading.Lock()
    _logged = ("", "")

    def _log_error(self, task: Any, req: Any, einfo: Any) -> None:
        completion = current_completion()
        if isinstance(completion, Completion) and completion.is_announced:
            task = SimpleNamespace(name=task.name, throws=(BaseException,))
        elif isinstance(completion, Completion) and completion.info is not None:
            fault = (completion.info["id"], einfo.traceback)
            with self._lock:
                is_known, OutcomeInfo._logged = fault == self._logged, fault
            if is_known:
                shown = {
                    name: getattr(einfo, name) for name in ("exception", "traceback", "internal")
                }
                einfo = SimpleNamespace(**shown, exc_info=None)
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
        return not lease.store.still_holds(lease.token)
    except (redis.RedisError, OSError):
        return False


def raised(info: ExceptionInfo) -> Any:
    """The exception that the tracer reports, without the wrapper that billiard puts around it."""
    error = info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def drop_frames(info: ExceptionInfo) -> None:
    """Takes its frames from the exception of a job that did not succeed.

    Celery clears some of them, while its own still run. Those hold the exception and a copy of its
    traceback, and it holds them: a circle of 0.3 MB, and of so few objects that Python's collector
    lets a thousand of them pile up.
    """
    # A copy of the traceback, for another process. Celery reads its text here.
    info.tb = None
    error = raised(info)
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
