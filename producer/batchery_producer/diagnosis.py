"""Stall diagnosis: why no results come, in one sentence from the broker and the workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from batchery.cli.survey import (
    aliases_in,
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


def find_task(app: Celery, name: str, queue: str | None) -> str:
    """The task that a name means: its own, or the model that has it as an alias.

    If the app knows neither, workers are asked for a second, as far as they answer.

    Args:
        app: The app that jobs are sent with.
        name: Name of a task, or an alias of a model.
        queue: The queue that the caller chose, if any; its worker may be yet to come.

    Raises:
        SettingsError: There are workers and none of them has such a task.
    """
    known: dict[str, Mapping[str, str]] = {
        task: {"model_aliases": getattr(each, "model_aliases", None) or ""}
        for task, each in app.tasks.items()
    }
    if (found := _find_in(known, name)) is not None:
        return found
    try:
        answers = registered_tasks(app, ["model_aliases"], ASK_S)
    except Exception:  # noqa: BLE001 (every transport has its own; some cannot ask at all)
        return name
    known = {task: info for tasks in answers.values() for task, info in tasks.items()}
    found = _find_in(known, name)
    if found is None and answers and queue is None:
        raise SettingsError(
            f"no worker that answers has a task {name!r}: {name_tasks(name, known)};"
            " if a worker for it is yet to come, name its queue: queue=..., or --queue"
        )
    return found or name


def _find_in(tasks: Mapping[str, Mapping[str, str]], name: str) -> str | None:
    """The task of this name, or with this alias."""
    if name in tasks:
        return name
    return next((task for task, info in tasks.items() if name in aliases_in(info)), None)


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
    known = registered_tasks(app, [], ASK_S, limit=len(names), names=names)
    if known and not any(task in tasks for tasks in known.values()):
        return f"{_list(names)} consumes it, but has no task {task!r}"
    return f"{_list(names)} consumes it and answers, so it is busy, or the jobs left no result"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
