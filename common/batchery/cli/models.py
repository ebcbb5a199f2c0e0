"""`batchery models`: the tasks that workers serve now, and their queues."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import click
from celery import Celery
from rich import box
from rich.table import Table

from batchery.cli.app import check_broker, timeout_option, with_app
from batchery.cli.console import broker_errors, render
from batchery.cli.survey import Registered, aliases_in, registered_tasks

#: How long workers may take to answer, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: Exit code if no worker answers.
NO_WORKER = 1

#: Attributes of tasks that tell what a task is.
FIELDS = ("model_queue", "model_aliases", "is_installed")

HELP = """List the tasks that workers serve now, for `batchery submit --task NAME`.

A model has a queue of its own; any other task is routed by the app.

\b
Exit codes:
  0  shown
  1  no worker answers
  2  could not start: no such app, or its broker does not answer
"""


@dataclass(frozen=True, slots=True)
class ServedTask:
    """A task that workers have.

    Attributes:
        task: Its name.
        kind: `model`, `batch` or `ordinary`.
        queue: A model's queue; None where the app routes it.
        aliases: Other names of a model, for OpenAI's clients.
        workers: Names of the workers that have it, sorted.
    """

    task: str
    kind: str
    queue: str | None
    aliases: Sequence[str]
    workers: Sequence[str]


def served_tasks(found: Registered) -> list[ServedTask]:
    """One entry per task, sorted by name."""
    fields: dict[str, Mapping[str, str]] = {}
    workers: dict[str, list[str]] = {}
    for worker, tasks in found.items():
        for name, info in tasks.items():
            fields.setdefault(name, info)
            workers.setdefault(name, []).append(worker)
    return [
        ServedTask(name, _kind(info), info.get("model_queue"), aliases_in(info), workers[name])
        for name, info in sorted(fields.items())
    ]


def _kind(info: Mapping[str, str]) -> str:
    if "model_queue" in info:
        return "model"
    return "batch" if "is_installed" in info else "ordinary"


@click.command(help=HELP)
@with_app
@click.option("--json", "as_json", is_flag=True, help="One JSON object per task, on a line each.")
@timeout_option(ANSWER_TIMEOUT_S, "How long to wait for the workers' answers.")
@click.pass_context
def models(context: click.Context, *, app: Celery, as_json: bool, timeout_s: float) -> None:
    """Runs the command; see `HELP`."""
    found = _ask(app, timeout_s)
    if as_json:
        for task in served_tasks(found):
            click.echo(json.dumps(asdict(task)))
    elif found:
        click.echo(draw(served_tasks(found)))
    else:
        click.echo("no worker answers; start one: celery -A APP worker", err=True)
    context.exit(0 if found else NO_WORKER)


def _ask(app: Celery, timeout_s: float) -> Registered:
    check_broker(app)
    with broker_errors():
        return registered_tasks(app, FIELDS, timeout_s)


def draw(tasks: Sequence[ServedTask]) -> str:
    """The tasks as a table."""
    table = Table("task", "kind", "queue", "also called", "workers", box=box.SIMPLE)
    for each in tasks:
        queue = each.queue or "routed"
        table.add_row(each.task, each.kind, queue, ", ".join(each.aliases), ", ".join(each.workers))
    return render(table)
