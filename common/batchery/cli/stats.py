"""`batchery stats`: figures of all workers' batches, live."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress

import click
from celery import Celery
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchery.cli.app import app_options, check_broker, load_app, timeout_option
from batchery.cli.console import Interrupt, broker_errors, render
from batchery.cli.stray_queues import ALL_CALLS, StrayQueues
from batchery.cli.survey import Survey, WorkerDirectory, app_queues, survey
from batchery.errors import StartError, counted
from batchery.protocol.figures import (
    GIVEN_UP,
    CacheFigures,
    DeviceSnapshot,
    LearnedCosts,
    ModelSnapshot,
    WorkerFigures,
)

#: Time of one look, in seconds: how long it collects the workers' answers.
REFRESH_S = 1.0

#: Exit code if no worker with batches answers.
NO_WORKER = 1

#: Shown where there is no figure yet.
NONE = "-"

#: A full bar of the size distribution, in characters.
BAR_WIDTH = 20

#: Colour of a device's state; other states have none.
STATE_STYLES = {"ready": "green", "starting": "yellow", "dead": "bold red"}

HELP = """Show what the batches of all workers look like, each second.

Queue depths come from the broker, for the queues of the app and those that workers consume; with
--once also for all others with jobs, as one may be misspelt.
Everything else comes from the workers that have batch tasks; others are not asked for figures.
"Oldest" is the age of the oldest job that waits in a worker; what is still in the queue may be
older. Rates are those between two looks.

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
@timeout_option(REFRESH_S, "How long a look waits for the workers' answers.")
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
    with suppress(Exception):  # They name queues, and this machine may lack what they import.
        app.loader.import_default_modules()
    context.exit(watch(app, once=once, as_json=as_json, timeout_s=timeout_s))


def watch(app: Celery, *, once: bool, as_json: bool, timeout_s: float = REFRESH_S) -> int:
    """Shows the figures of all workers until Ctrl-C, or once.

    Args:
        app: The app whose workers and queues are shown.
        once: Look twice and show the second look.
        as_json: Print JSON lines instead of tables.
        timeout_s: How long a look takes, in seconds.

    Returns:
        The exit code.
    """
    check_broker(app)
    if once:
        return _show_once(app, as_json, timeout_s)
    with Interrupt(at_once=True) as interrupt:
        if as_json:
            _print_lines(app, timeout_s, interrupt)
        else:
            _live(app, timeout_s, interrupt)
    return 0


def _show_once(app: Celery, as_json: bool, timeout_s: float) -> int:
    directory, queues = WorkerDirectory(app), app_queues(app)
    first = survey(directory, app, timeout_s, queues)
    with broker_errors():
        queues |= set(StrayQueues(app).look(first.queues, ALL_CALLS))
    time.sleep(timeout_s)
    second = survey(directory, app, timeout_s, queues)
    if as_json:
        click.echo(json.dumps(second.report(first)))
    else:
        click.echo(render(dashboard(second, first)))
    return 0 if second.figures else NO_WORKER


def _print_lines(app: Celery, timeout_s: float, interrupt: Interrupt) -> None:
    before: Survey | None = None
    directory, queues = WorkerDirectory(app), app_queues(app)
    while True:
        next_s = time.monotonic() + timeout_s
        now = survey(directory, app, timeout_s, queues)
        interrupt.check()
        click.echo(json.dumps(now.report(before)))
        before = now
        time.sleep(max(0.0, next_s - time.monotonic()))


def _live(app: Celery, timeout_s: float, interrupt: Interrupt) -> None:
    before: Survey | None = None
    directory, queues = WorkerDirectory(app), app_queues(app)
    with Live("asking the workers ...", auto_refresh=False) as live:
        while True:
            interrupt.check()
            next_s = time.monotonic() + timeout_s
            try:
                now = survey(directory, app, timeout_s, queues)
            except StartError as error:
                # The broker was there before. A person who watches wants to see it come back.
                live.update(str(error), refresh=True)
                time.sleep(timeout_s)
                continue
            live.update(dashboard(now, before), refresh=True)
            before = now
            time.sleep(max(0.0, next_s - time.monotonic()))


def dashboard(now: Survey, before: Survey | None = None) -> RenderableType:
    """Draws a survey; the one before gives the rates, and the workers that no longer answer."""
    parts: list[RenderableType] = []
    problems = now.problems(before)
    for name in sorted(now.workers):
        if figures := now.figures.get(name):
            parts += [worker_table(name, figures, now.rates(name, before)), size_table(figures)]
        else:
            parts.append(Text(f"{name}: {problems.pop(name)}"))
    parts += [Text(f"{name}: {why}", style="red") for name, why in problems.items()]
    if not now.workers:
        text = "no worker answers; start one, or wait until it has loaded its models"
        parts.append(Text(f"{text}: celery -A APP worker"))
    if now.queues:
        parts.append(queue_table(now.queues))
    if orphaned := sum(now.orphaned.values()):
        text = "of these jobs are held by dead workers, until one that lives gives them back"
        parts.append(Text(f"{orphaned:,} {text}", "red"))
    if now.dead_letters:
        parts.append(Text(f"dead letters: {now.dead_letters:,}; see `batchery dead list`", "red"))
    return Group(*parts)


def queue_table(queues: Mapping[str, int]) -> Table:
    """How many messages wait in the broker, per queue."""
    table = Table("queue", box=box.SIMPLE)
    table.add_column("jobs waiting in the broker", justify="right")
    for name, depth in queues.items():
        table.add_row(name, f"{depth:,}")
    return table


def worker_table(name: str, figures: WorkerFigures, rates: Mapping[str, float] | None) -> Table:
    """The figures of one worker, a row each. Means are over its whole life, rates are current."""
    table = Table(title=name, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for device, state in figures.devices.items():
        table.add_row(f"device {device}", _device(state))
        table.add_row(f"memory of {device}", _memory(state))
        for model, info in state.models.items():
            table.add_row(f"{model} on {device}", _model(info))
            if info.fitted_batches is not None:
                table.add_row("", _costs(info))
    done = figures.batches
    oldest = _number(figures.oldest_waiting_s, "s")
    rows = {
        "queues": ", ".join(figures.queues) or NONE,
        "waiting here": f"{counted(figures.waiting, 'job')}, oldest {oldest}",
        "now": _rates(rates),
        "done": f"{counted(done.jobs, 'job')}, {counted(done.items, 'item')} in"
        f" {counted(done.batches, 'batch')},"
        f" {_number(done.mean_batch_size, 'items')} each",
        "waited": _number(done.mean_waited_ms, "ms"),
        "forward": _number(done.mean_forward_ms, "ms"),
        "other stages": f"prepare {_number(done.mean_prepare_ms, 'ms')},"
        f" between {_number(done.mean_queued_ms, 'ms')},"
        f" commit {_number(done.mean_commit_ms, 'ms')}",
        "padding waste": percent(done.padding_waste),
        "failed jobs": f"{done.failed_jobs:,}",
        "device restarts": f"{done.device_restarts:,}",
        **{f"batch of {task}": _batch_costs(costs) for task, costs in figures.costs.items()},
        "failed by": _counts(done.failures),
        "by the tracer": _counts(done.tracer_jobs),
        **{f"cache of {task}": _cache(cache) for task, cache in done.caches.items()},
    }
    for label, text in rows.items():
        if text:
            table.add_row(label, text)
    return table


def _counts(reasons: Mapping[str, int]) -> str:
    return "\n".join(f"{count:,}: {reason}" for reason, count in reasons.items())


def size_table(figures: WorkerFigures) -> Table:
    """How many batches had how many items, as bars."""
    sizes = figures.batches.batch_sizes
    table = Table(title="Items per batch", title_justify="left", box=box.SIMPLE, show_header=False)
    most = max(sizes.values(), default=1)
    for size, count in sizes.items():
        width = max(1, round(BAR_WIDTH * count / most))
        table.add_row(size.replace("<=", "up to "), f"{count:,}", Text("█" * width, style="cyan"))
    if not sizes:
        table.add_row("no batch yet")
    return table


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return NONE if share is None else f"{100 * share:.0f} %"


def _device(device: DeviceSnapshot) -> Text:
    if device.state == "drained":
        return Text("drained, see `batchery drain`")
    if device.state == GIVEN_UP:
        return Text(f"given up, see `batchery drain --undo`: {device.error}", "bold red")
    return Text.assemble(
        (device.state, STATE_STYLES.get(device.state, "")),
        f", pid {device.pid}, loaded in {device.load_s:.1f} s,"
        f" batches in flight: {device.batches_in_flight}",
    )


def _memory(device: DeviceSnapshot) -> str:
    memory, parts = device.memory, []
    if device.resident_kib:
        parts.append(f"{_mib(device.resident_kib * 1024)} of main memory")
    if memory.reserved_bytes is not None and memory.peak_bytes is not None:
        held, peak = _mib(memory.reserved_bytes), _mib(memory.peak_bytes)
        parts.append(f"{held} of the device, peak {peak}")
    return ", ".join(parts) or NONE


def _model(model: ModelSnapshot) -> str:
    version = f", version {model.version}" if model.version else ""
    if model.slots:
        steps = f"{model.steps:,} steps of {_number(model.step_ms, 'ms')}"
        return f"{model.slots_taken} of {counted(model.slots, 'slot')} taken, {steps}{version}"
    if model.state != "loaded":
        return model.state
    failed = model.out_of_memory
    peak = f", peak {_mib(model.peak_bytes)}" if model.peak_bytes is not None else ""
    out = f", out of memory {counted(failed, 'time')}" if failed else ""
    budget = f"max_batch_tokens {model.max_batch_tokens:,}, chosen by {model.chosen_by}"
    return f"{budget}{out}{peak}{version}"


def _cache(cache: CacheFigures) -> str:
    error = f"; {cache.errors:,} errors, {cache.error}" if cache.errors else ""
    return (
        f"{percent(cache.hit_rate)} of {cache.items:,} items not computed:"
        f" {cache.hits:,} hits, {cache.deduplicated:,} deduplicated;"
        f" {cache.results:,} results, {_mib(cache.bytes)}{error}"
    )


def _costs(model: ModelSnapshot) -> str:
    """What a forward pass costs, learned from the batches that ran."""
    enough = f"; {model.useful_items:,} items fill one" if model.useful_items else ""
    fitted = counted(model.fitted_batches or 0, "batch")
    return (
        f"{model.token_us:,.1f} µs per token, {model.item_us:,.1f} µs per item,"
        f" {model.pass_ms:,.2f} ms per pass, by {fitted}{enough}"
    )


def _batch_costs(costs: LearnedCosts) -> str:
    """How long a batch has its device, learned from those that ran."""
    return (
        f"{costs.pass_ms:,.2f} ms and {costs.item_us:,.1f} µs per item,"
        f" off by {percent(costs.error)} on average, by {counted(costs.batches, 'batch')}"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def _rates(rates: Mapping[str, float] | None) -> str:
    if rates is None:
        return NONE
    shown = f"{rates['jobs_per_s']:,.1f} jobs/s, {rates['items_per_s']:,.1f} items/s"
    failed = rates["failed_jobs_per_s"]
    return f"{shown}, {failed:,.1f} failures/s" if failed else shown


def _number(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{value:,.1f} {unit}"
