"""`batchery stats`: what workers do and serve, and what waits in queues."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import click
from celery import Celery
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from batchery.cli.app import app_options, check_broker, load_app, timeout_option
from batchery.cli.console import Interrupt, broker_errors, render
from batchery.cli.stray_queues import ALL_CALLS, StrayQueues
from batchery.cli.survey import (
    DISCOVERY_S,
    PATIENCE_S,
    Registered,
    Survey,
    aliases_in,
    app_queues,
    has_batch_tasks,
    registered_tasks,
    survey,
)
from batchery.errors import StartError, counted
from batchery.protocol.figures import (
    GIVEN_UP,
    CacheFigures,
    DeviceSnapshot,
    LearnedCosts,
    ModelSnapshot,
    WorkerFigures,
)

#: Time from one look to the next, in seconds, if all answer at once.
REFRESH_S = 1.0

#: Exit code if no worker with devices answers.
NO_WORKER = 1

#: Shown where there is no figure yet.
NONE = "-"

#: Attributes of tasks that tell what a task is.
FIELDS = ("model_queue", "model_aliases", "is_installed")

NOT_INSTALLED = "has batch tasks and runs them one by one: call batchery.install(app) in its code"

NO_ANSWER = "no worker answers; start one, or wait until it has loaded its models"

HELP = """Show what workers do and serve, and what waits in queues.

It goes on, each second, until Ctrl-C. Redis knows which workers live. A look ends when all of them
have answered, which may take a while on a busy machine. Queue depths come from the broker, for the
queues of the app and those that workers consume; with --once also for all others with jobs, as one
may be misspelt. Rates are those between two looks. docs/observe.md explains every figure.

\b
Exit codes:
  0    shown
  1    with --once: no worker with devices answered
  2    could not start: no such app, or its broker does not answer
  130  interrupted
"""


@click.command(help=HELP)
@app_options
@click.option("--once", is_flag=True, help="Look twice, for the rates, and show it once.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per look, on a line each.")
@timeout_option(PATIENCE_S, "How long a look waits for a worker that lives and does not answer.")
@click.pass_context
def stats(
    context: click.Context,
    *,
    app_path: str,
    redis_url: str | None,
    once: bool,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path, redis_url)
    # Raises what is wrong in the settings; once suppressed, Celery would ask a broker of its own.
    _ = app.conf.broker_url
    with suppress(Exception):  # They name queues, and this machine may lack what they import.
        app.loader.import_default_modules()
    context.exit(watch(app, once=once, as_json=as_json, timeout_s=timeout_s))


def watch(app: Celery, *, once: bool, as_json: bool, timeout_s: float = PATIENCE_S) -> int:
    """Shows the figures of all workers until Ctrl-C, or once.

    Args:
        app: The app whose workers and queues are shown.
        once: Look twice and show the second look.
        as_json: Print JSON lines instead of tables.
        timeout_s: How long a look waits for a worker that lives, in seconds.

    Returns:
        The exit code.
    """
    check_broker(app)
    queues = app_queues(app)
    if once:
        before = look(app, queues, timeout_s)
        with broker_errors():
            queues |= set(StrayQueues(app).look(before.queues, ALL_CALLS))
        now = look(app, queues, timeout_s)
        click.echo(json.dumps(now.report(before)) if as_json else render(draw(now, before)))
        return 0 if now.figures else NO_WORKER
    with Interrupt(at_once=True) as interrupt, _open_screen(as_json) as show:
        last: Survey | None = None
        while True:
            next_s = time.monotonic() + REFRESH_S
            try:
                now = look(app, queues, timeout_s)
                show(json.dumps(now.report(last)) if as_json else draw(now, last))
                last = now
            except StartError as error:
                # The broker was there before. A person who watches wants to see it come back.
                if as_json:
                    raise
                show(str(error))
            interrupt.check()
            time.sleep(max(0.0, next_s - time.monotonic()))


@contextmanager
def _open_screen(as_json: bool) -> Iterator[Callable[[Any], object]]:
    if as_json:
        yield click.echo
        return
    with Live("asking the workers ...", auto_refresh=False) as live:
        yield lambda drawing: live.update(drawing, refresh=True)


def look(app: Celery, queues: Collection[str], timeout_s: float) -> Survey:
    """A survey with the tasks of all workers; those that run batch tasks one by one are named.

    Args:
        app: The app whose workers are asked.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
        timeout_s: How long workers are awaited that live, in seconds.
    """
    found = survey(app, timeout_s, queues)
    with broker_errors():
        tasks = registered_tasks(app, FIELDS, DISCOVERY_S)
        if late := [name for name in found.figures if name not in tasks]:
            tasks = {**tasks, **registered_tasks(app, FIELDS, timeout_s, names=late)}
    plain = {
        name: {"error": NOT_INSTALLED}
        for name, each in tasks.items()
        if has_batch_tasks(each, "False") and not has_batch_tasks(each)
    }
    return replace(found, workers={**plain, **found.workers}, tasks=list_served(tasks))


def list_served(found: Registered) -> list[dict[str, Any]]:
    """One entry per task, sorted by name: what it is, its queue, other names, and its workers."""
    served: dict[str, dict[str, Any]] = {}
    for worker, tasks in found.items():
        for name, info in tasks.items():
            queue = info.get("model_queue")
            kind = "model" if queue else "batch" if "is_installed" in info else "ordinary"
            new = {"task": name, "kind": kind, "queue": queue, "aliases": aliases_in(info)}
            served.setdefault(name, {**new, "workers": []})["workers"].append(worker)
    return [each for _, each in sorted(served.items())]


# Tables


def draw(now: Survey, before: Survey | None = None) -> RenderableType:
    """Draws a survey; the one before gives the rates, and the workers that no longer answer."""
    parts: list[RenderableType] = [
        draw_worker(name, figures, now.rates(name, before)) for name, figures in now.figures.items()
    ]
    parts += [Text(f"{name}: {why}", "red") for name, why in now.problems(before).items()]
    if not now.workers:
        parts.append(Text(f"{NO_ANSWER}: celery -A APP worker"))
    waiting = [(name, f"{depth:,}") for name, depth in now.queues.items()]
    count = Column("jobs waiting in the broker", justify="right")
    parts.append(_draw_table(waiting, "queue", count))
    tasks = [
        (each["task"], each["kind"], each["queue"] or "routed", *_join(each, "aliases", "workers"))
        for each in now.tasks
    ]
    parts.append(_draw_table(tasks, "task", "kind", "queue", "also called", "workers"))
    if orphaned := sum(now.orphaned.values()):
        text = "of these jobs are held by dead workers, until one that lives gives them back"
        parts.append(Text(f"{orphaned:,} {text}", "red"))
    if now.dead_letters:
        parts.append(Text(f"dead letters: {now.dead_letters:,}; see `batchery dead list`", "red"))
    return Group(*parts)


def _join(task: Mapping[str, Any], *names: str) -> list[str]:
    return [", ".join(task[name]) for name in names]


def _draw_table(
    rows: Sequence[Sequence[str]], *heads: str | Column, title: str = ""
) -> RenderableType:
    table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE, show_header=any(heads))
    for row in rows:
        table.add_row(*row)
    return table if rows else Group()


def draw_worker(
    name: str, figures: WorkerFigures, rates: Mapping[str, float] | None
) -> RenderableType:
    """The figures of one worker, a row each. Means are over its whole life, rates are current."""
    done, rows = figures.batches, dict[str, str]()
    for device, state in figures.devices.items():
        rows |= {f"device {device}": _device(state), f"memory of {device}": _memory(state)}
        rows |= {f"{each} on {device}": _model(model) for each, model in state.models.items()}
    oldest, size = _number(figures.oldest_waiting_s, "s"), _number(done.mean_batch_size, "items")
    rows |= {
        "queues": ", ".join(figures.queues) or NONE,
        "waiting here": f"{counted(figures.waiting, 'job')}, oldest {oldest}",
        "now": _rates(rates),
        "done": f"{counted(done.jobs, 'job')}, {counted(done.items, 'item')} in"
        f" {counted(done.batches, 'batch')}, {size} each",
        "waited": _number(done.mean_waited_ms, "ms"),
        "forward": _number(done.mean_forward_ms, "ms"),
        "other stages": f"prepare {_number(done.mean_prepare_ms, 'ms')},"
        f" between {_number(done.mean_queued_ms, 'ms')},"
        f" commit {_number(done.mean_commit_ms, 'ms')}",
        "padding waste": percent(done.padding_waste),
        "failed jobs": f"{done.failed_jobs:,}",
        "device restarts": f"{done.device_restarts:,}",
        "items per batch": ", ".join(
            f"{n:,} up to {size[2:]}" for size, n in done.batch_sizes.items()
        ),
        **{f"batch of {task}": _costs(costs) for task, costs in figures.costs.items()},
        "failed by": _counts(done.failures),
        "by the tracer": _counts(done.tracer_jobs),
        **{f"cache of {task}": _cache(cache) for task, cache in done.caches.items()},
    }
    return _draw_table([row for row in rows.items() if row[1]], "", "", title=name)


def _counts(reasons: Mapping[str, int]) -> str:
    return "\n".join(f"{count:,}: {reason}" for reason, count in reasons.items())


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return NONE if share is None else f"{100 * share:.0f} %"


def _device(device: DeviceSnapshot) -> str:
    if device.state == "drained":
        return "drained, see `batchery drain`"
    if device.state == GIVEN_UP:
        return f"given up, see `batchery drain --undo`: {device.error}"
    return (
        f"{device.state}, pid {device.pid}, loaded in {device.load_s:.1f} s,"
        f" batches in flight: {device.batches_in_flight}"
    )


def _memory(device: DeviceSnapshot) -> str:
    memory, resident_kib = device.memory, device.resident_kib
    parts = [] if resident_kib is None else [f"{_mib(resident_kib * 1024)} of main memory"]
    if memory.reserved_bytes is not None:
        held, peak = _mib(memory.reserved_bytes), _mib(memory.peak_bytes)
        parts.append(f"{held} of the device, peak {peak}")
    return ", ".join(parts)


def _model(model: ModelSnapshot) -> str:
    """What it does, what it holds, and why it is there."""
    parts = [model.state]
    if model.slots:
        steps = f"{model.steps:,} steps of {_number(model.step_ms, 'ms')}"
        parts.append(f"{model.slots_taken} of {counted(model.slots, 'slot')} taken, {steps}")
    elif model.state == "loaded":
        parts.append(f"max_batch_tokens {model.max_batch_tokens:,}, chosen by {model.chosen_by}")
    if model.out_of_memory:
        parts.append(f"out of memory {counted(model.out_of_memory, 'time')}")
    if model.held_bytes is not None:
        parts.append(f"holds {_mib(model.held_bytes)}")
    if model.load_s is not None:
        parts.append(f"{counted(model.loads, 'load')}, the last in {model.load_s:.1f} s")
    parts += [f"version {model.version}"] if model.version else []
    if model.fitted_batches is not None:
        pass_ms, token_us = f"{model.pass_ms:,.2f} ms", f"{model.token_us:,.1f} µs"
        parts.append(f"a pass takes {pass_ms} and {token_us} per token")
    return ", ".join([*parts, model.why] if model.why else parts)


def _cache(cache: CacheFigures) -> str:
    error = f"; {cache.errors:,} errors, {cache.error}" if cache.errors else ""
    return (
        f"{percent(cache.hit_rate)} of {cache.items:,} items not computed:"
        f" {cache.hits:,} hits, {cache.deduplicated:,} deduplicated;"
        f" {cache.results:,} results, {_mib(cache.bytes)}{error}"
    )


def _costs(costs: LearnedCosts) -> str:
    """How long a batch has its device, learned from those that ran."""
    return (
        f"{costs.pass_ms:,.2f} ms and {costs.item_us:,.1f} µs per item,"
        f" off by {percent(costs.error)} on average, by {counted(costs.batches, 'batch')}"
    )


def _mib(size_bytes: int | None) -> str:
    return NONE if size_bytes is None else f"{size_bytes / 2**20:,.0f} MiB"


def _rates(rates: Mapping[str, float] | None) -> str:
    if rates is None:
        return NONE
    shown = f"{rates['jobs_per_s']:,.1f} jobs/s, {rates['items_per_s']:,.1f} items/s"
    failed = rates["failed_jobs_per_s"]
    return f"{shown}, {failed:,.1f} failures/s" if failed else shown


def _number(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{value:,.1f} {unit}"
