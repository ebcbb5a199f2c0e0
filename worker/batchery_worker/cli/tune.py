"""`batchery tune`: which limits suit a model on this machine."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TextIO

import click
from celery import Celery
from rich import box
from rich.console import Console
from rich.table import Table

from batchery.cli.app import DEFAULT_APP, load_app
from batchery.errors import SettingsError, StartError
from batchery.execution.batch import prepare
from batchery.execution.bisect_failures import SETTLED
from batchery.install import installation_of
from batchery.task import ModelTask
from batchery_worker.cli.tune_search import SIZES, TOKENS, Case, Search, recommend
from batchery_worker.device.loading import load_model, memory_of
from batchery_worker.device_pool.discovery import choose

#: Width of the bar of the best pair, in characters.
BAR_WIDTH = 12

HELP = """Find the max_batch_size and max_batch_tokens that suit a model on this machine.

Computes the same texts with many pairs of limits, in turn, until the time is up; says on standard
error how far it is. Give texts of your own: how their lengths differ decides. Needs neither Redis
nor a worker; where a worker runs, both need room on the device, and the figures are of what it
leaves.

\b
Exit codes:
  0    measured
  2    could not start: no such app, model or device, or nothing to measure with
  130  interrupted
"""


def paragraphs() -> list[str]:
    """The text that every Python carries: its language reference, in pieces of mixed length."""
    pieces = (piece.strip() for text in topics.values() for piece in text.split("\n\n"))
    return list(dict.fromkeys(piece for piece in pieces if any(map(str.isalnum, piece))))


@click.command(help=HELP)
@click.argument("name", metavar="MODEL")
@click.option("-A", "--app", "app_path", default=DEFAULT_APP, show_default=True, help="Celery app.")
@click.option("--device", help="Such as cuda:1; else the first that a worker would use.")
@click.option(
    "--texts",
    type=click.File(encoding="utf-8"),
    help="A text per line, instead of Python's own documentation.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long to measure; each max_batch_size once at least.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it; needs matplotlib.")
def tune(
    *,
    name: str,
    app_path: str,
    device: str | None,
    texts: TextIO | None,
    seconds: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path)
    task = _model_task(app, name)
    device = device or choose(installation_of(app).settings.devices)[0]
    lines = [line.strip() for line in texts or () if line.strip()]
    report = tuned(
        task, device, lines or paragraphs(), seconds, lambda line: click.echo(line, err=True)
    )
    click.echo(json.dumps(report)) if as_json else _print(report)
    if plot is not None:
        _draw(report, plot)


def tuned(
    task: ModelTask,
    device: str,
    texts: Sequence[Any],
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures the model of a task.

    Args:
        task: Whose model it is.
        device: As torch spells it.
        texts: Items of its jobs.
        seconds: How long; where memory runs out, at most twice that.
        tell: Called with lines that say how far it is.

    Returns:
        What JSON shows: `rows` of `Case.row`, `left_out`, the pairs for which there was no time,
        `recommended` limits, and `fits_tokens`, the largest forward pass that fits into memory,
        None if all of them did.

    Raises:
        ModelLoadError: It cannot be loaded.
        DeviceUnavailable: There is no such device.
        StartError: None of the texts is fit to run.
    """
    tell(f"loading {task.name} on {device}")
    model = load_model(task, device)
    items = [each for each in prepare(model, texts, {}) if not isinstance(each, SETTLED)]
    if not items:
        raise StartError(f"model {task.name!r}: none of {len(texts)} texts is fit to run")
    search = Search(model, items, device, memory_of(device))
    cases = search.run(SIZES, TOKENS, seconds, _Progress(seconds, tell))
    failed = [case.largest_pass for case in cases if case.out_of_memory]
    fitted = [case.largest_pass for case in cases if not case.out_of_memory]
    fits = None
    if failed:
        tell("looking for the largest forward pass that fits into memory")
        fits = search.largest_budget(max(fitted, default=0), min(failed), seconds)
    best = recommend(cases, fits)
    return {
        "model": task.name,
        "device": device,
        "items": len(items),
        "mean_tokens": round(sum(map(model.tokens, items)) / len(items), 1),
        "rows": [case.row() for case in cases],
        "left_out": search.left_out,
        "fits_tokens": fits,
        "recommended": {
            "max_batch_size": best.max_batch_size,
            "max_batch_tokens": best.max_batch_tokens or None,
        },
    }


class _Progress:
    """A line for each case, and later one a second."""

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._tell = tell
        self._began_s = time.monotonic()
        self._told_s = 0.0

    def __call__(self, case: Case) -> None:
        now_s = time.monotonic()
        if len(case.rates) > 1 and now_s - self._told_s < 1:
            return
        self._told_s = now_s
        rate = "out of memory" if case.out_of_memory else f"{case.rates[-1]:,.1f} items/s"
        self._tell(
            f"{now_s - self._began_s:.0f} s of {self._seconds:g}: max_batch_size"
            f" {case.max_batch_size}, max_batch_tokens {case.max_batch_tokens or '-'}: {rate}"
        )


def _model_task(app: Celery, name: str) -> ModelTask:
    tasks = [each for each in app.tasks.values() if isinstance(each, ModelTask)]
    for task in tasks:
        if task.name == name:
            return task
    there = f"there are {', '.join(sorted(task.name for task in tasks))}" if tasks else "none is"
    raise SettingsError(f"model {name!r}: not configured; {there}")


def _print(report: dict[str, Any]) -> None:
    # Broken by hand, so that it fits into 80 columns.
    heads = ("max_batch_\nsize", "max_batch_\ntokens", "items/s", "", "spread", "padding\nwaste")
    table = Table(*heads, box=box.SIMPLE)
    best_rate = max(row["items_per_s"] for row in report["rows"])
    for row in report["rows"]:
        low, high = row["spread"] or ("", "")
        table.add_row(
            str(row["max_batch_size"]),
            str(row["max_batch_tokens"] or ""),
            "out of memory" if row["out_of_memory"] else f"{row['items_per_s']:,}",
            "█" * round(BAR_WIDTH * row["items_per_s"] / best_rate) if best_rate else "",
            f"{low:,} to {high:,}" if row["spread"] else "",
            f"{100 * row['padding_waste']:.0f} %",
        )
    console = Console(highlight=False)
    console.print(
        f"{report['model']} on {report['device']}: {report['items']:,} items,"
        f" {report['mean_tokens']} tokens on average"
    )
    console.print(table)
    if report["left_out"]:
        console.print(f"No time for {report['left_out']} more pairs: give more --seconds.")
    if report["fits_tokens"]:
        console.print(f"Forward passes of up to {report['fits_tokens']:,} tokens fit into memory.")
    best = report["recommended"]
    console.print("Recommended: the smallest within 5 % of the best.", style="bold")
    for key, value in best.items():
        if value is not None:
            console.print(f"{key} = {value}")


def _draw(report: dict[str, Any], target: Path) -> None:
    """One line per size: items per second over the token budget."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise StartError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots()
    for size in sorted({row["max_batch_size"] for row in report["rows"] if row["spread"]}):
        rows = [
            each for each in report["rows"] if each["max_batch_size"] == size and each["spread"]
        ]
        budgets = [each["max_batch_tokens"] or report["mean_tokens"] for each in rows]
        axes.plot(budgets, [each["items_per_s"] for each in rows], "o-", label=str(size))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("max_batch_tokens")
    axes.set_ylabel(f"items/s of {report['model']} on {report['device']}")
    axes.legend(title="max_batch_size")
    figure.savefig(target, bbox_inches="tight")
