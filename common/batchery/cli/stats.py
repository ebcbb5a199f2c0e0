"""`batchery stats`: what workers do and serve, and what waits in queues."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import click
from celery import Celery
from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from batchery.cli.app import app_options, check_broker, load_app, timeout_option
from batchery.cli.console import broker_errors, describe, render
from batchery.cli.survey import (
    PATIENCE_S,
    Survey,
    app_queues,
    consumed_queues,
    survey,
)
from batchery.protocol.figures import GIVEN_UP, WorkerFigures

#: Exit code if no worker with devices answers.
NO_WORKER = 1

#: Shown where there is no figure yet.
NONE = "-"

#: What is shown of each thing: the paths of its figures.
DEVICE = (
    *("state", "error", "pid", "load_s", "batches_in_flight", "resident_kib"),
    *("memory.reserved_bytes", "memory.peak_bytes"),
)
MODEL = (
    *("state", "slots_taken", "slots", "steps", "step_ms", "max_batch_tokens", "chosen_by"),
    *("out_of_memory", "held_bytes", "loads", "load_s", "version", "pass_ms", "token_us", "why"),
)
DONE = (
    *("jobs", "items", "batches", "mean_batch_size", "padding_waste", "failed_jobs"),
    "device_restarts",
)
TIMES = tuple(f"mean_{stage}_ms" for stage in ("waited", "prepare", "queued", "forward", "commit"))
COSTS = ("pass_ms", "item_us", "error", "batches")
CACHE = ("hit_rate", "items", "hits", "deduplicated", "errors", "error")

#: What to do about the state of a device.
HINTS = {GIVEN_UP: ", restart its worker when it is mended"}

NO_ANSWER = "no worker answers; start one, or wait until it has loaded its models"


@click.command()
@app_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@timeout_option(PATIENCE_S, "How long to wait for a worker that lives and does not answer.")
@click.pass_context
def stats(
    context: click.Context,
    *,
    app_path: str,
    redis_url: str | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Show what workers do and serve, and what waits in queues.

    Redis knows which workers live. The command ends when all of them have answered, which may take
    a while on a busy machine. Queue depths come from the broker, for the queues of the app and
    those that workers consume. docs/observe.md explains every figure.

    \b
    Exit codes:
      0  shown
      1  no worker with devices answered
      2  could not start: no such app, or its broker does not answer
    """  # noqa: D301 (click looks for this character)
    app = load_app(app_path, redis_url)
    # Raises what is wrong in the settings; once suppressed, Celery would ask a broker of its own.
    _ = app.conf.broker_url
    with suppress(Exception):  # They name queues, and this machine may lack what they import.
        app.loader.import_default_modules()
    context.exit(show(app, as_json=as_json, timeout_s=timeout_s))


def show(app: Celery, *, as_json: bool, timeout_s: float = PATIENCE_S) -> int:
    """Shows a survey, as tables or as JSON; returns the exit code."""
    check_broker(app)
    now = survey(app, timeout_s, app_queues(app))
    if now.unserved:  # Workers without leases may serve them.
        with broker_errors():
            served = set[str]().union(*consumed_queues(app).values())
        now = replace(now, unserved={*now.unserved} - served)
    click.echo(json.dumps(now.report()) if as_json else render(draw(now)))
    return 0 if now.figures else NO_WORKER


# Tables


def draw(now: Survey) -> RenderableType:
    """Draws a survey."""
    parts: list[RenderableType] = [draw_worker(*each) for each in now.figures.items()]
    parts += [Text(f"{name}: {why}", "red") for name, why in now.problems().items()]
    if not now.workers:
        parts.append(Text(f"{NO_ANSWER}: celery -A APP worker"))
    waiting = [
        (name, f"{depth:,}", "no worker serves it" if name in now.unserved else "")
        for name, depth in now.queues.items()
    ]
    count = Column("jobs waiting in the broker", justify="right")
    parts.append(_draw_table(waiting, "queue", count, ""))
    if now.dead_letters:
        parts.append(Text(f"dead letters: {now.dead_letters:,}; see `batchery dead list`", "red"))
    return Group(*parts)


def _draw_table(
    rows: Sequence[Sequence[str]], *heads: str | Column, title: str = ""
) -> RenderableType:
    table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE, show_header=any(heads))
    for row in rows:
        table.add_row(*row)
    return table if rows else Group()


def draw_worker(name: str, figures: WorkerFigures) -> RenderableType:
    """The figures of one worker, a row each, by the names that they have in JSON."""
    done, rows = figures.batches, dict[str, str]()
    for device, state in figures.devices.items():
        rows[f"device {device}"] = describe(state, DEVICE) + HINTS.get(state.state, "")
        rows |= {f"{each} on {device}": describe(m, MODEL) for each, m in state.models.items()}
    rows |= {
        "queues": ", ".join(figures.queues),
        "waiting here": describe(figures, ("waiting", "oldest_waiting_s"), NONE),
        "done": describe(done, DONE, NONE),
        "a batch took": describe(done, TIMES, NONE),
        **{f"batch of {task}": describe(costs, COSTS) for task, costs in figures.costs.items()},
        "failed by": _count(done.failures),
        "by the tracer": _count(done.tracer_jobs),
        **{f"cache of {task}": describe(cache, CACHE) for task, cache in done.caches.items()},
    }
    return _draw_table([row for row in rows.items() if row[1]], "", "", title=name)


def _count(reasons: Mapping[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda each: -each[1])
    return "\n".join(f"{count:,}: {reason}" for reason, count in ordered)
