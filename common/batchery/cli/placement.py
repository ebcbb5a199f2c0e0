"""`batchery placement`: which models are on which devices, in what state, and why."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

import click
from celery import Celery
from rich import box
from rich.console import Group
from rich.table import Table

from batchery.cli.app import check_broker, timeout_option, with_app
from batchery.cli.console import render
from batchery.cli.stats import NO_WORKER, NONE, REFRESH_S
from batchery.cli.survey import WorkerDirectory, survey
from batchery.protocol.figures import ModelSnapshot, WorkerFigures

HELP = """Show which models are on which devices of all workers, and why.

A model is loaded; or aside, in main memory, from where it comes back fast; or not loaded, until it
has jobs. "Why" names what put it there: the model's settings devices, replicas and pinned, or the
first job that came for it.

\b
Exit codes:
  0  shown
  1  no worker with devices answered
  2  could not start: no such app, or its broker does not answer
"""


@click.command(help=HELP)
@with_app
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each model and device.")
@timeout_option(REFRESH_S, "How long the workers' answers are collected.")
@click.pass_context
def placement(context: click.Context, *, app: Celery, as_json: bool, timeout_s: float) -> None:
    """Runs the command; see `HELP`."""
    check_broker(app)
    found = survey(WorkerDirectory(app), app, timeout_s, ())
    if as_json:
        for worker, figures in found.figures.items():
            for device, name, model in list_models(figures):
                places = {"worker": worker, "device": device, "model": name}
                click.echo(json.dumps({**places, **asdict(model)}))
    elif found.figures:
        tables = [placement_table(*each, time.time()) for each in found.figures.items()]
        click.echo(render(Group(*tables)))
    else:
        click.echo("no worker with devices answers; start one, or wait until it is ready", err=True)
    context.exit(0 if found.figures else NO_WORKER)


def list_models(figures: WorkerFigures) -> Iterator[tuple[str, str, ModelSnapshot]]:
    """Each model of each device of a worker: device, name, and what is known of it."""
    for device, snapshot in figures.devices.items():
        for name, model in snapshot.models.items():
            yield device, name, model


def placement_table(worker: str, figures: WorkerFigures, now_s: float) -> Table:
    """A row for each model of each device of a worker."""
    table = Table("device", "model", "state", title=worker, title_justify="left", box=box.SIMPLE)
    for column in ("memory", "load", "loads", "last used"):
        table.add_column(column, justify="right")
    table.add_column("why")
    for device, name, model in list_models(figures):
        used_s = None if model.used_at_s is None else max(0.0, now_s - model.used_at_s)
        table.add_row(
            *(device, name, model.state),
            NONE if model.held_bytes is None else f"{model.held_bytes / 2**20:,.1f} MiB",
            NONE if model.load_s is None else f"{model.load_s:,.1f} s",
            f"{model.loads:,}",
            NONE if used_s is None else f"{used_s:,.0f} s ago",
            model.why or NONE,
        )
    return table
