"""`celery inspect batchery`: figures of a worker's batches, over Celery's remote control.

In a worker, this module registers the command that answers. Celery's command line asks only for
commands that it knows by name; there, this module makes the name known, by the subcommand below.
"""

from dataclasses import asdict
from typing import Any

import click
from celery.worker.control import control_command, inspect_command

from batchery.protocol.commands import FIGURES, RELOAD

NO_DEVICE = {"error": "no batch task is routed to this worker's queues, so it has no device"}


@inspect_command(name=FIGURES)
def figures(state: Any, **_: Any) -> dict[str, Any]:
    """Devices, waiting jobs and batches of a worker."""
    return collect_figures(state.consumer) or NO_DEVICE


def collect_figures(consumer: Any) -> dict[str, Any] | None:
    """The figures of a worker, by Celery's consumer; None if it has no devices.

    On the thread of the event loop.
    """
    fleet = getattr(consumer.controller, "fleet", None)
    if fleet is None:
        return None
    watch = getattr(consumer.controller, "watch", None)
    return {
        **fleet.figures(),
        "queues": sorted({*_queues(consumer), *fleet.queues}),
        **({"health": asdict(watch.check_health())} if watch is not None else {}),
    }


@control_command(name=RELOAD)
def reload(state: Any, number: str, task: str) -> dict[str, Any]:
    """Loads another version of a model; asked again, it says how far that is."""
    reloads = getattr(state.consumer.controller, "reloads", None)
    return NO_DEVICE if reloads is None else dict(reloads.begin(number, task))


def _queues(consumer: Any) -> list[str]:
    # Imported here, as Celery imports this module for each of its commands.
    from batchery.transport.redis_schema import find_own

    # While the broker is away, nothing is consumed.
    tasks = consumer.task_consumer
    return sorted({find_own(queue.name) for queue in tasks.queues}) if tasks else []


@click.command(FIGURES, short_help="Show what the batches of all workers look like.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@click.pass_context
def batchery(context: click.Context, *, as_json: bool) -> None:
    """Show what the batches of all workers look like; as `batchery stats` for Celery's app."""
    # Imported here, because Celery imports this module for each of its commands, also for workers.
    from batchery.cli.main import one_line_errors
    from batchery.cli.stats import show

    with one_line_errors():
        context.exit(show(context.obj.app, as_json=as_json))
