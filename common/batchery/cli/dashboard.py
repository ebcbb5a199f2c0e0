"""A survey as tables for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchery.cli.survey import Survey
from batchery.errors import counted

#: Shown where there is no figure yet.
NONE = "-"

#: A full bar of the size distribution, in characters.
BAR_WIDTH = 20

#: Colour of a device's state; other states have none.
STATE_STYLES = {"ready": "green", "starting": "yellow", "dead": "bold red"}


def dashboard(now: Survey, before: Survey | None = None) -> RenderableType:
    """Draws a survey; the one before gives the rates, and the workers that no longer answer."""
    silent = sorted(set(before.workers) - set(now.workers)) if before is not None else []
    parts: list[RenderableType] = []
    for name, figures in sorted(now.workers.items()):
        if "batches" in figures:
            parts += [worker_table(name, figures, now.rates(name, before)), size_table(figures)]
        else:
            parts.append(Text(f"{name}: {figures.get('error', 'answers with something else')}"))
    parts += [Text(f"{name}: no answer", style="red") for name in silent]
    if not now.workers:
        text = "no worker answers; start one, or wait until it has loaded its models"
        parts.append(Text(f"{text}: celery -A APP worker"))
    if now.queues:
        parts.append(queue_table(now.queues))
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


def worker_table(name: str, figures: Mapping[str, Any], rates: Mapping[str, float] | None) -> Table:
    """The figures of one worker, a row each. Means are over its whole life, rates are current."""
    table = Table(title=name, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for device, state in figures["devices"].items():
        table.add_row(f"device {device}", _device(state))
        table.add_row(f"memory of {device}", _memory(state))
        for model, info in state.get("models", {}).items():
            table.add_row(f"{model} on {device}", _model(info))
            if "fitted_batches" in info:
                table.add_row("", _costs(info))
    batches = figures["batches"]
    oldest = _number(figures["oldest_waiting_s"], "s")
    rows = {
        "queues": ", ".join(figures["queues"]) or NONE,
        "waiting here": f"{counted(figures['waiting'], 'job')}, oldest {oldest}",
        "now": _rates(rates),
        "done": f"{counted(batches['jobs'], 'job')}, {counted(batches['items'], 'item')} in"
        f" {counted(batches['batches'], 'batch')},"
        f" {_number(batches['mean_batch_size'], 'items')} each",
        "waited": _number(batches["mean_waited_ms"], "ms"),
        "forward": _number(batches["mean_forward_ms"], "ms"),
        "other stages": _stages(batches),
        "padding waste": percent(batches["padding_waste"]),
        "failed jobs": f"{batches['failed_jobs']:,}",
        "device restarts": f"{batches['device_restarts']:,}",
    }
    # A worker of an earlier version reports none of these.
    for task, info in figures.get("costs", {}).items():
        rows[f"batch of {task}"] = _batch_costs(info)
    if failures := batches.get("failures"):
        rows["failed by"] = "\n".join(f"{count:,}: {error}" for error, count in failures.items())
    if slow := batches.get("tracer_jobs"):
        rows["by the tracer"] = "\n".join(f"{jobs:,}: {reason}" for reason, jobs in slow.items())
    for task, cache in batches.get("caches", {}).items():
        rows[f"cache of {task}"] = _cache(cache)
    for label, text in rows.items():
        table.add_row(label, text)
    return table


def size_table(figures: Mapping[str, Any]) -> Table:
    """How many batches had how many items, as bars."""
    sizes: Mapping[str, int] = figures["batches"]["batch_sizes"]
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


def _device(state: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (state["state"], STATE_STYLES.get(state["state"], "")),
        f", pid {state['pid']}, loaded in {state['load_s']:.1f} s,"
        f" batches in flight: {state['batches_in_flight']}",
    )


def _memory(state: Mapping[str, Any]) -> str:
    resident_kib, device = state.get("resident_kib"), state.get("memory")
    parts = [f"{_mib(resident_kib * 1024)} of main memory"] if resident_kib else []
    if device:
        held, peak = _mib(device["reserved_bytes"]), _mib(device["peak_bytes"])
        parts.append(f"{held} of the device, peak {peak}")
    return ", ".join(parts) or NONE


def _model(info: Mapping[str, Any]) -> str:
    failed = info["out_of_memory"]
    peak = f", peak {_mib(info['peak_bytes'])}" if "peak_bytes" in info else ""
    out = f", out of memory {counted(failed, 'time')}" if failed else ""
    return (
        f"max_batch_tokens {info['max_batch_tokens']:,}, chosen by {info['chosen_by']}{out}{peak}"
    )


def _cache(cache: Mapping[str, Any]) -> str:
    error = f"; {cache['errors']:,} errors, {cache['error']}" if cache["errors"] else ""
    return (
        f"{percent(cache['hit_rate'])} of {cache['items']:,} items not computed:"
        f" {cache['hits']:,} hits, {cache['deduplicated']:,} deduplicated;"
        f" {cache['results']:,} results, {_mib(cache['bytes'])}{error}"
    )


def _costs(info: Mapping[str, Any]) -> str:
    """What a forward pass costs, learned from the batches that ran."""
    useful = info["useful_items"]
    fitted = counted(info["fitted_batches"], "batch")
    enough = f"; {useful:,} items fill one" if useful else ""
    return (
        f"{info['token_us']:,.1f} µs per token, {info['item_us']:,.1f} µs per item,"
        f" {info['pass_ms']:,.2f} ms per pass, by {fitted}{enough}"
    )


def _batch_costs(info: Mapping[str, Any]) -> str:
    """How long a batch has its device, learned from those that ran."""
    return (
        f"{info['pass_ms']:,.2f} ms and {info['item_us']:,.1f} µs per item,"
        f" off by {percent(info['error'])} on average, by {counted(info['batches'], 'batch')}"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def _stages(batches: Mapping[str, Any]) -> str:
    shown = {"prepare": "mean_prepare_ms", "between": "mean_queued_ms", "commit": "mean_commit_ms"}
    # A worker of an earlier version does not report all of them.
    means = {label: batches.get(name) for label, name in shown.items()}
    return ", ".join(f"{label} {_number(mean, 'ms')}" for label, mean in means.items())


def _rates(rates: Mapping[str, float] | None) -> str:
    if rates is None:
        return NONE
    shown = f"{rates['jobs_per_s']:,.1f} jobs/s, {rates['items_per_s']:,.1f} items/s"
    failed = rates["failed_jobs_per_s"]
    return f"{shown}, {failed:,.1f} failures/s" if failed else shown


def _number(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{value:,.1f} {unit}"
