"""Stall diagnosis: why no results come, in one sentence from the broker and the workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from batchery.cli.survey import (
    name_tasks,
    queue_depths,
    registered_tasks,
)
from batchery.errors import SettingsError
from batchery.queue_limits import find_destination
from batchery.settings import nearest_name
from batchery_producer.publisher import route_unknown

#: How long workers may take to answer, in seconds; later answers are ignored.
ASK_S = 1.0


def check_task(app: Celery, name: str, queue: str | None) -> None:
    """Makes sure that a worker may have a task, as far as workers answer within a second.

    Args:
        app: The app that jobs are sent with.
        name: Name of the task.
        queue: The queue that the caller chose, if any; its worker may be yet to come.

    Raises:
        SettingsError: There are workers, and none of them has such a task; nor has the app.
    """
    if name in app.tasks or queue is not None:
        return
    try:
        answers = registered_tasks(app, ASK_S)
    except Exception:  # noqa: BLE001 (every transport has its own; some cannot ask at all)
        return
    known = {task for tasks in answers.values() for task in tasks}
    if answers and name not in known:
        raise SettingsError(
            f"no worker that answers has a task {name!r}: {name_tasks(name, known)};"
            " if a worker for it is yet to come, name its queue: queue=..., or --queue"
        )


def explain_stall(app: Celery, task: str, options: Mapping[str, Any]) -> str:
    """Says how many jobs wait in the queue of a task, and which workers would take them.

    This takes a few seconds. It also says if the broker cannot be asked.
    """
    queue = task
    try:
        queue = find_destination(app, task, route_unknown(app, task, options)).queue
        workers = app.control.inspect(timeout=ASK_S).active_queues() or {}
        waiting = queue_depths(app, {queue})[queue]
        return f"{waiting:,} waiting in queue {queue!r}; {_workers(app, workers, task, queue)}"
    except Exception as error:  # noqa: BLE001 (every transport has its own, as has a router)
        return f"the broker cannot be asked about queue {queue!r}: {error}"


def _workers(
    app: Celery, workers: Mapping[str, Sequence[Mapping[str, Any]]], task: str, queue: str
) -> str:
    if not workers:
        return (
            "no worker answers (none runs, all are too busy, or they use another broker):"
            f" start one with `celery -A YOUR_APP worker -Q {queue}`"
        )
    consumers = {name: {each["name"] for each in queues} for name, queues in workers.items()}
    names = sorted(name for name, consumed in consumers.items() if queue in consumed)
    if not names:
        consumed = sorted(set().union(*consumers.values()))
        return (
            f"{_list(sorted(workers))} answers, but consumes another queue"
            f"{nearest_name(queue, consumed)}:"
            f" start a worker with `-Q {queue}`, or name its queue: queue=..., or --queue"
        )
    known = registered_tasks(app, ASK_S, limit=len(names), names=names)
    if known and not any(task in tasks for tasks in known.values()):
        return f"{_list(names)} consumes it, but has no task {task!r}"
    return f"{_list(names)} consumes it and answers, so it is busy, or the jobs left no result"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
