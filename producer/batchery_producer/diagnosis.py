"""Stall diagnosis: why no results come, in one sentence from the broker and the workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery

from batchery.cli.survey import (
    Registered,
    aliases_in,
    name_tasks,
    parse_registered,
    queue_depths,
    registered_tasks,
)
from batchery.errors import SettingsError
from batchery.queue_limits import find_destination
from batchery.settings import nearest_name
from batchery_producer.publisher import route_unknown

#: Duration of a stall after which the user is told once what the client waits for, in seconds.
HINT_S = 20.0

#: How long workers may take to answer, in seconds; later answers are ignored.
ASK_S = 1.0

#: Maximum number of tasks that a message names.
MAX_NAMED = 8


class StallDetector:
    """Detects that no results come, and says why."""

    def __init__(
        self, explain: Callable[[], str], notice: Callable[[str], None], timeout_s: float | None
    ) -> None:
        """Starts now.

        Args:
            explain: Says why no results may come.
            notice: Gets a line for the user, once in each stall that lasts `HINT_S`.
            timeout_s: Maximum duration of a stall, in seconds; None is no limit.
        """
        self._explain = explain
        self._notice = notice
        self._timeout_s = timeout_s
        self.progressed()

    def progressed(self) -> None:
        """Notes that a result came, or that the first job was sent."""
        self._progress_s, self._hinted = time.monotonic(), False

    def check(self) -> str:
        """The error message of a stall that lasts too long; empty otherwise."""
        stalled_s = time.monotonic() - self._progress_s
        if self._timeout_s is not None and stalled_s > self._timeout_s:
            return f"no result for {self._timeout_s:g} s: {self._explain()}"
        if stalled_s > HINT_S and not self._hinted:
            self._hinted = True
            self._notice(f"no result for {stalled_s:.0f} s: {self._explain()}")
        return ""


def find_task(app: Celery, name: str, queue: str | None) -> str:
    """The task that a name means: its own, or the model that has it as an alias.

    Workers are asked only if the app does not know it. That takes a moment if the first that
    answers has it, otherwise a second or two.

    Args:
        app: The app that jobs are sent with.
        name: Name of a task, or an alias of a model.
        queue: The queue that the caller chose, if any.

    Raises:
        SettingsError: There are workers, none of them has such a task, and no queue was chosen.
    """
    if name in app.tasks:
        return name
    own = {task: getattr(each, "model_aliases", None) or "" for task, each in app.tasks.items()}
    for task, aliases in own.items():
        if name in aliases.split(","):
            return str(task)
    try:
        first = registered_tasks(app, ["model_aliases"], ASK_S, limit=1)
        if not first or any(name in tasks for tasks in first.values()):
            return name
        every = registered_tasks(app, ["model_aliases"], ASK_S)
    except Exception:  # noqa: BLE001 (as below)
        return name
    known = {task: info for tasks in every.values() for task, info in tasks.items()}
    if name in known:
        return name
    for task, info in known.items():
        if name in aliases_in(info):
            return task
    if queue is None:
        raise SettingsError(
            f"no worker that answers has a task {name!r}: {name_tasks(name, known)};"
            " if a worker for it is yet to come, name its queue: queue=..., or --queue"
        )
    return name


def check_workers(app: Celery, task: str, queue: str) -> None:
    """Checks that a worker has a task, as far as workers answer.

    This takes a moment if such a worker answers quickly, otherwise a few seconds.

    Raises:
        SettingsError: Workers consume the queue, and none of them has the task.
    """
    try:
        first = registered_tasks(app, [], ASK_S, limit=1)
        if not first or any(task in tasks for tasks in first.values()):
            return
        queues = app.control.inspect(timeout=ASK_S).active_queues() or {}
        consumers = _consumers(queues, queue)
        known = _read_tasks(app, consumers) if consumers else None
    except Exception:  # noqa: BLE001 (every transport has its own; some cannot ask at all)
        return
    if known and not any(task in tasks for tasks in known.values()):
        has = sorted({name for tasks in known.values() for name in tasks})
        more = f" and {len(has) - MAX_NAMED} more" if len(has) > MAX_NAMED else ""
        raise SettingsError(
            f"task {task!r}: {_list(consumers)} consumes queue {queue!r} and has no such task;"
            f" it has {', '.join(has[:MAX_NAMED]) or 'none'}{more}"
        )


def explain_stall(app: Celery, task: str, options: Mapping[str, Any]) -> str:
    """Says how many jobs wait in the queue of a task, and which workers would take them.

    This takes a few seconds. It also says if the broker cannot be asked.
    """
    queue = find_destination(app, task, route_unknown(app, task, options)).queue
    try:
        workers = app.control.inspect(timeout=ASK_S).active_queues() or {}
        waiting = queue_depths(app, {queue})[queue]
        return f"{waiting:,} waiting in queue {queue!r}; {_workers(app, workers, task, queue)}"
    except Exception as error:  # noqa: BLE001 (every transport has its own)
        return f"the broker cannot be asked about queue {queue!r}: {error}"


def _workers(
    app: Celery, workers: Mapping[str, Sequence[Mapping[str, Any]]], task: str, queue: str
) -> str:
    if not workers:
        return (
            "no worker answers (none runs, all are too busy, or they use another broker):"
            f" start one with `celery -A YOUR_APP worker -Q {queue}`"
        )
    consumers = _consumers(workers, queue)
    if not consumers:
        consumed = sorted({each["name"] for queues in workers.values() for each in queues})
        return (
            f"{_list(sorted(workers))} answers, but consumes another queue"
            f"{nearest_name(queue, consumed)}:"
            f" start a worker with `-Q {queue}`, or name its queue: queue=..., or --queue"
        )
    known = _read_tasks(app, consumers)
    if known and not any(task in tasks for tasks in known.values()):
        return f"{_list(consumers)} consumes it, but has no task {task!r}"
    return f"{_list(consumers)} consumes it and answers, so it is busy, or the jobs left no result"


def _read_tasks(app: Celery, workers: Sequence[str]) -> Registered:
    """The tasks of some workers; Celery adds a rate limit to the name of a task that has one."""
    return parse_registered(app.control.inspect(workers, timeout=ASK_S).registered() or {})


def _consumers(workers: Mapping[str, Sequence[Mapping[str, Any]]], queue: str) -> list[str]:
    """Names of the workers that consume a queue."""
    return sorted(
        name for name, queues in workers.items() if any(each["name"] == queue for each in queues)
    )


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
