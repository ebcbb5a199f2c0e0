"""Which jobs only Celery's own tracer can complete; the results of all others a device may store.

Three answers, by how long they hold: a task's for the life of a worker, the signals' until somebody
connects to one, a message's for its job. All of them are about jobs that succeed: every other
outcome needs the tracer, which only the device can know.

Not asked for, as a device can do them as well: `group`, `result_extended`, key prefixes,
`ignore_result`.
"""

from collections.abc import Mapping
from typing import Any

from celery import Celery, Task, signals
from celery.backends.redis import RedisBackend

from batchery.task import BatchTask

#: What Celery calls around a task, and leaves to the task's own class.
HOOKS = ("before_start", "on_success", "on_failure", "on_retry", "after_return")

#: Signals that the tracer sends.
SIGNALS: Mapping[str, Any] = {
    name: getattr(signals, name)
    for name in ("task_prerun", "task_postrun", "task_success", "task_failure")
}

#: Celery's receivers for Django live here. They close the connections of the process that ran the
#: function; with us that is a device, which does so itself, once per call: `functions.py`.
FIXUPS = "celery.fixups."


class TracerNeeds:
    """Remembers the answers that hold, so that a job costs well below a microsecond."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._tasks: dict[str, str | None] = {}
        self._receivers: dict[str, str | None] = {}
        #: The receivers of each signal, as they were when `_receivers` was filled.
        self._connected: list[list[Any]] = []

    def why(
        self, task: BatchTask, message: Mapping[str, Any], embed: Mapping[str, Any] | None
    ) -> str | None:
        """Says why a job needs the tracer; None if it does not.

        Args:
            task: The job's task.
            message: The headers of its message.
            embed: The third part of the message's body.
        """
        return self.why_all(task) or request_needs_tracer(message, embed)

    def why_all(self, task: BatchTask) -> str | None:
        """Says why all jobs of a task need the tracer as of now; None if they do not."""
        name = task.name
        if name not in self._tasks:
            self._tasks[name] = task_needs_tracer(self._app, task)
        connected = [each.receivers for each in SIGNALS.values()]
        if connected != self._connected:
            self._connected = [list(each) for each in connected]
            self._receivers.clear()
        if name not in self._receivers:
            self._receivers[name] = receivers_need_tracer(task)
        return self._tasks[name] or self._receivers[name]


def task_needs_tracer(app: Celery, task: BatchTask) -> str | None:
    """Says why all jobs of a task need the tracer; None if they do not.

    Args:
        app: The app of the worker.
        task: One of its tasks.
    """
    backend: Any = task.backend
    clauses = (
        (type(task).__call__ is not BatchTask.__call__, "__call__ is overridden"),
        *((_overrides(task, hook), f"{hook} is overridden") for hook in HOOKS),
        (task.track_started, "task_track_started"),
        (getattr(task, "autoretry_for", ()), "autoretry_for"),
        (backend is not app.backend, "a result backend of its own"),
        (type(backend) is not RedisBackend, "a result backend other than Celery's for Redis"),
        (backend.serializer != "json", "a result serializer other than JSON"),
        (getattr(backend, "compression", None), "compressed results"),
    )
    return next((reason for holds, reason in clauses if holds), None)


def receivers_need_tracer(task: BatchTask) -> str | None:
    """Says why all jobs of a task need the tracer, as of now: somebody listens to their signals."""
    for name, signal in SIGNALS.items():
        # Celery has no public way to ask who listens, only whether somebody does.
        for receiver in signal._live_receivers(task):
            if not str(getattr(receiver, "__module__", "")).startswith(FIXUPS):
                return f"a receiver of {name}"
    return None


def request_needs_tracer(message: Mapping[str, Any], embed: Mapping[str, Any] | None) -> str | None:
    """Says why one job needs the tracer; None if it does not.

    Args:
        message: The headers of its message.
        embed: The third part of the message's body.
    """
    if message.get("replaced_task_nesting"):
        return "it replaced another job"
    for name in ("callbacks", "errbacks", "chain", "chord"):
        if embed and embed.get(name):
            return name
    return None


def _overrides(task: BatchTask, hook: str) -> bool:
    ours = getattr(task, hook)
    return getattr(ours, "__func__", ours) is not getattr(Task, hook)
