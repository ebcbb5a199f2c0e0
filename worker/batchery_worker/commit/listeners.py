"""Calls what listens to a job: hooks of its task, receivers of signals, Sentry's transactions.

Celery's tracer calls them around the task. A job that its device commits has no tracer, so they are
called here in two parts, in the tracer's order and with its arguments. The first part comes before
the batch leaves, the second one when the result is stored. Both see the job's request as
`task.request`, and share one `contextvars.Context`, so that what the first part sets the second
finds.

If the job needs the tracer after all, for instance because it failed, the tracer leaves out the
first part (`completion/tracer.py`).
"""

import contextvars
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery import signals
from celery.app import trace
from celery.app.task import Context
from celery.exceptions import WorkerLostError, WorkerShutdown, WorkerTerminate
from celery.states import SUCCESS
from kombu.utils.encoding import safe_repr

from batchery.request import bind_request
from batchery_worker.commit import sentry
from batchery_worker.in_flight import TaskCall

#: Package of Celery's receivers for Django, which close database connections after each job. They
#: do not count: the device that ran the function closes its own (`device/functions.py`).
FIXUPS = "celery.fixups."

#: Signals of the two parts.
SIGNALS_BEFORE = (signals.task_prerun,)
SIGNALS_AFTER = (signals.task_success, signals.task_postrun)


@dataclass(slots=True)
class ListenedJob:
    """What the two parts of a job share."""

    request: Context
    #: What `before_start` raised, or a receiver that ends its process: the job's outcome.
    error: Exception | None = None
    scope: AbstractContextManager[Any] | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class CommittedJob(NamedTuple):
    """A job that a device has committed."""

    call: TaskCall
    #: Its result, for what listens to it.
    value: Any
    #: The same as text, for events and the log; None if nobody reads it.
    text: str | None
    #: Facts of its batch.
    info: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """Its result in events and in the log, also where it is not known any more."""
        return "..." if self.text is None else self.text


def find_runtime_s(info: Mapping[str, Any] | None) -> float:
    """How long a job ran for Celery, in seconds: as long as its device had its batch."""
    return 0.0 if info is None else float(info["forward_ms"]) / 1e3


def listens_before(task: Any) -> bool:
    """Whether anything listens to the jobs of a task before they run."""
    return _has_hook(task, "before_start") or _has_receivers(task, SIGNALS_BEFORE)


def listens_after(task: Any) -> bool:
    """Whether anything listens to the jobs of a task that have succeeded."""
    hooks = _has_hook(task, "on_success") or _has_hook(task, "after_return")
    return hooks or sentry.traces() or _has_receivers(task, SIGNALS_AFTER)


def call_before(task: Any, call: TaskCall) -> None:
    """Calls what comes before a job; once, however often the job is sent to a device."""
    if call.listened is None:
        call.listened = listened = _listened(call)
        listened.context.run(_call_before, task, call, listened)


def _call_before(task: Any, call: TaskCall, listened: ListenedJob) -> None:
    listened.scope = sentry.isolated(call.task_id)
    job = (call.task_id, call.message.get("args"), call.message.get("kwargs"))
    try:
        with bind_request(task, listened.request):
            _send_prerun(task, *job)
            task.before_start(*job)
    except (WorkerShutdown, WorkerTerminate):
        raise  # Celery's own way to end the worker, in the handler of a signal.
    except Exception as error:  # noqa: BLE001 - the tracer tells Celery
        listened.error = error
    except BaseException as error:  # noqa: BLE001 - it ends a process of Celery's own pool
        listened.error = WorkerLostError(f"{error!r} in what comes before {task.name}")


def call_after(task: Any, job: CommittedJob) -> None:
    """Calls what comes after a job that has succeeded and is stored."""
    listened = job.call.listened or _listened(job.call)
    listened.context.run(_call_after, task, job, listened)


def _call_after(task: Any, job: CommittedJob, listened: ListenedJob) -> None:
    message, value, runtime_s = job.call.message, job.value, find_runtime_s(job.info)
    given = (job.call.task_id, message.get("args"), message.get("kwargs"))

    def notify() -> None:
        try:
            _guarded(task, listened, "on_success", value, *given)
            signals.task_success.send(sender=task, result=value, runtime=runtime_s)
            log_success(job)
            _guarded(task, listened, "after_return", SUCCESS, value, *given, None)
        finally:
            _send_postrun(task, *given, value)

    with bind_request(task, listened.request):
        if sentry.traces():
            sentry.traced(task, notify, (*given, message), runtime_s)
        else:
            notify()
    leave(listened)


def leave(listened: ListenedJob) -> None:
    """Leaves what the first part has entered; in the job's context."""
    if listened.scope is not None:
        listened.scope.__exit__(None, None, None)
        listened.scope = None


def log_success(job: CommittedJob) -> None:
    """Logs a success in the words of Celery's tracer."""
    if trace.logger.isEnabledFor(logging.INFO):
        message = job.call.message
        context = {
            "id": job.call.task_id,
            "name": message.get("shadow") or job.call.task_name,
            "return_value": job.shown,
            "runtime": find_runtime_s(job.info),
            "args": message.get("argsrepr") or safe_repr(message.get("args")),
            "kwargs": message.get("kwargsrepr") or safe_repr(message.get("kwargs")),
        }
        trace.info(trace.LOG_SUCCESS, context)


def _listened(call: TaskCall) -> ListenedJob:
    """Makes a job's request as Celery's tracer makes it."""
    message = dict(call.message)
    return ListenedJob(Context(message, called_directly=False, is_eager=False, **call.embed))


def _has_hook(task: Any, name: str) -> bool:
    # Celery looks at the class alone.
    return trace.task_has_custom(task, name) is not None


def _has_receivers(task: Any, sent: tuple[Any, ...]) -> bool:
    return any(
        not str(getattr(receiver, "__module__", "")).startswith(FIXUPS)
        for signal in sent
        # Celery has no public way to list the receivers, only to ask whether there is one.
        for receiver in signal._live_receivers(task)
    )


def _send_prerun(task: Any, task_id: str, args: Any, kwargs: Any) -> None:
    signals.task_prerun.send(sender=task, task_id=task_id, task=task, args=args, kwargs=kwargs)


def _send_postrun(task: Any, task_id: str, args: Any, kwargs: Any, value: Any) -> None:
    signals.task_postrun.send(
        sender=task,
        task_id=task_id,
        task=task,
        args=args,
        kwargs=kwargs,
        retval=value,
        state=SUCCESS,
    )


def _guarded(task: Any, listened: ListenedJob, hook: str, *args: Any) -> None:
    """Calls a hook; logs what it raises in the words of Celery's tracer."""
    call: Callable[..., Any] = getattr(task, hook)
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - logged, with its traceback
        name = trace.get_task_name(listened.request, task.name)
        trace.logger.exception(
            "Task %s[%s] %s handler raised: %r", name, listened.request.id, hook, error
        )
        trace.traceback_clear(error)
