"""`batchery tune`: which limits suit a model on this machine."""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TextIO

import click
from celery import Celery
from rich import box
from rich.console import Console
from rich.table import Table

from batchery.cli.app import DEFAULT_APP, SECONDS, load_app
from batchery.device_names import device_type
from batchery.errors import SettingsError, StartError
from batchery.execution.batch import compute, prepare
from batchery.execution.bisect_failures import NON_VALUES
from batchery.installation import get_installation
from batchery.model import Model
from batchery.model_task import ModelTask
from batchery_worker.batching.planner import MIN_STREAM_TOKENS, PASS_TOKENS, plan
from batchery_worker.device.loading import find_memory, load_model, sample_items, sample_keywords
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.memory import Memory

#: The grid. A batch of one shows what batching is worth.
SIZES = (1, 16, 64, 256)
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

#: Trials of each pair of limits, of which the median counts.
ROUNDS = 3

#: Items of the pass that warms up.
WARM_UP_ITEMS = 16

#: Share of the best rate that is given away for smaller batches. They take less memory, and each
#: job waits for fewer others.
SPARED_SHARE = 0.05

#: Maximum recommended share of what fits into memory: other inputs may take more.
MEMORY_SHARE = 0.8

#: Width of the bar of the best pair, in characters.
BAR_WIDTH = 12

HELP = """Find the max_batch_size and max_batch_tokens that suit a model on this machine.

Computes the same texts with a grid of limits, three times, and takes the medians; says on standard
error how far it is. Give texts of your own: the best limits depend on their lengths. Needs neither
Redis nor a worker. A worker that runs on the device meanwhile makes the figures worse.

\b
Exit codes:
  0    measured
  2    could not start: no such app, model or device, or nothing to measure with
  130  interrupted
"""


def read_texts(_: click.Context, __: click.Parameter, file: TextIO | None) -> list[str]:
    """The lines of a file; none without a file."""
    try:
        with file or nullcontext(()) as lines:
            return [text for line in lines if (text := line.strip())]
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file and file.name}: no text in UTF-8: {error}") from None


def paragraphs() -> list[str]:
    """The text that every Python carries: its language reference, in pieces of mixed length."""
    pieces = (piece.strip() for text in topics.values() for piece in text.split("\n\n"))
    return list(dict.fromkeys(piece for piece in pieces if any(map(str.isalnum, piece))))


@dataclass(slots=True)
class Case:
    """One pair of limits, and what was measured with it."""

    max_batch_size: int
    #: 0 for batches of one, which no budget can divide.
    max_batch_tokens: int
    rates: list[float] = field(default_factory=list)
    #: Tokens of the items in all rounds, and the same with padding.
    tokens: int = 0
    computed_tokens: int = 0
    #: Largest forward pass, in tokens; smaller than the budget where the batches are too small.
    largest_pass: int = 0
    out_of_memory: bool = False

    @property
    def items_per_s(self) -> float:
        """Median of all rounds; 0 where memory ran out."""
        return 0.0 if self.out_of_memory or not self.rates else statistics.median(self.rates)

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that carried nothing."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    def row(self) -> dict[str, Any]:
        """The case in JSON."""
        rates = self.rates if not self.out_of_memory else []
        return {
            "max_batch_size": self.max_batch_size,
            "max_batch_tokens": self.max_batch_tokens,
            "items_per_s": round(self.items_per_s, 1),
            "spread": [round(min(rates), 1), round(max(rates), 1)] if rates else None,
            "padding_waste": round(self.padding_waste, 3),
            "largest_pass_tokens": self.largest_pass,
            "out_of_memory": self.out_of_memory,
        }


class _Witness:
    """Sees how large the passes were, and whether one failed."""

    def __init__(self) -> None:
        self.largest = 0
        self.failed_tokens = 0

    def passed(self, tokens: int) -> None:
        self.largest = max(self.largest, tokens)

    def failed(self, tokens: int) -> None:
        self.failed_tokens = max(self.failed_tokens, tokens)


class Grid:
    """Measures one model over the same items with different limits."""

    def __init__(
        self,
        model: Model,
        items: Sequence[Any],
        device: str,
        memory: Memory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measures nothing yet.

        Args:
            model: Loaded.
            items: Prepared, and all of them fit to run; at least one.
            device: As torch spells it.
            memory: Of that device.
            clock: Seconds, on any scale.
        """
        self._model = model
        self._keywords = sample_keywords(model)
        # A trial may end after some of the items, which must be like all of them.
        self._items = random.Random(1).sample(list(items), len(items))
        self._lengths = [max(1, model.tokens(each)) for each in self._items]
        #: Pairs of limits for which there was no time.
        self.left_out = 0
        self._pass_tokens = PASS_TOKENS[device_type(device)]
        self._min_stream_tokens = MIN_STREAM_TOKENS[device_type(device)]
        self._memory = memory
        self._clock = clock

    def run(
        self,
        sizes: Sequence[int],
        tokens: Sequence[int],
        limit_s: float,
        on_trial: Callable[[Case], None] = lambda _: None,
    ) -> list[Case]:
        """Measures all pairs of limits in turn, `ROUNDS` times if there is time.

        No trial takes more than its part of the time, or one batch if that takes longer, however
        slow the model or busy the machine.

        Args:
            sizes: Of `max_batch_size`.
            tokens: Of `max_batch_tokens`.
            limit_s: How long it takes, but for the batch that runs; each size is measured once at
                least.
            on_trial: Called with a case after each of its trials.

        Returns:
            The cases that were measured, by size, then by tokens. Budgets beyond one that ran out
            of memory with the same size are left out.
        """
        longest = max(self._lengths)
        cases = [
            Case(size, budget)
            for size in sizes
            for budget in (_useful(tokens, size * longest) if size > 1 else [0])
        ]
        end_s = self._clock() + limit_s
        warm_up = self._items[:WARM_UP_ITEMS]
        compute(self._model, warm_up, self._keywords, lambda all_: [range(len(all_))])
        # Small budgets first: they need the least memory, and suit most models.
        turns = sorted(cases, key=lambda case: case.max_batch_tokens)
        for _ in range(ROUNDS):
            for case in turns:
                sizes_measured = {each.max_batch_size for each in cases if each.rates}
                in_time = self._clock() < end_s or case.max_batch_size not in sizes_measured
                if in_time and not _is_too_large(case, cases):
                    self._measure(case, limit_s / (ROUNDS * len(cases)))
                    on_trial(case)
        measured = [case for case in cases if case.rates]
        self.left_out = sum(not case.rates and not _is_too_large(case, measured) for case in cases)
        return measured

    def _measure(self, case: Case, limit_s: float) -> None:
        """Runs one trial: all items, or as many as there is time for."""
        witness = _Witness()
        cut = partial(self._cut, case)
        tokens = start = 0
        self._memory.wait()
        began_s = self._clock()
        while start == 0 or (start < len(self._items) and self._clock() < began_s + limit_s):
            part = self._items[start : start + case.max_batch_size]
            _, needed, computed = compute(self._model, part, self._keywords, cut, memory=witness)
            tokens += needed
            case.computed_tokens += computed
            start += case.max_batch_size
        self._memory.wait()
        # By tokens, because the items of one trial may be longer than those of another.
        mean = statistics.fmean(self._lengths)
        case.rates.append(tokens / mean / max(self._clock() - began_s, 1e-9))
        case.tokens += tokens
        case.largest_pass = max(case.largest_pass, witness.largest)
        if witness.failed_tokens:
            case.out_of_memory = True
            case.largest_pass = witness.failed_tokens
            self._memory.release()

    def _cut(self, case: Case, lengths: Sequence[int]) -> list[list[int]]:
        return plan(
            lengths,
            case.max_batch_tokens or max(lengths),
            case.max_batch_size,
            pads=self._model.pads,
            pass_tokens=self._pass_tokens,
            streams=getattr(self._model, "pass_streams", 1),
            min_stream_tokens=self._min_stream_tokens,
        )


def _useful(tokens: Sequence[int], largest: int) -> list[int]:
    """The budgets that make a difference: those below the largest batch, and one above."""
    below = [each for each in tokens if each < largest]
    return below + [each for each in tokens if each >= largest][:1]


def _is_too_large(case: Case, cases: Sequence[Case]) -> bool:
    """Whether this budget, or a smaller one with the same size, ran out of memory."""
    return any(
        each.out_of_memory
        and each.max_batch_size == case.max_batch_size
        and each.max_batch_tokens <= case.max_batch_tokens
        for each in cases
    )


def recommend(cases: Sequence[Case], fits: int | None = None) -> Case:
    """The smallest limits whose rate is about as good as the best.

    Args:
        cases: Measured.
        fits: Tokens of the largest pass that fits into memory; None if all did.
    """
    best = max(case.items_per_s for case in cases)
    room = float("inf") if fits is None else MEMORY_SHARE * fits
    good = [
        case
        for case in cases
        if not case.out_of_memory
        and case.items_per_s >= (1 - SPARED_SHARE) * best
        and case.max_batch_tokens <= room
    ]
    # Where nothing good fits with a margin, limits that ran are still better than a guess.
    ran = [case for case in cases if not case.out_of_memory]
    return min(good or ran or cases, key=lambda case: (case.max_batch_size, case.max_batch_tokens))


@click.command(help=HELP)
@click.argument("name", metavar="MODEL")
@click.option("-A", "--app", "app_path", default=DEFAULT_APP, help="Celery app.")
@click.option("--device", help="Such as cuda:1; else the first that a worker would use.")
@click.option(
    "--texts",
    type=click.File(encoding="utf-8"),
    callback=read_texts,
    help="A text per line, instead of Python's own documentation.",
)
@click.option(
    "--seconds",
    type=SECONDS,
    default=60.0,
    help="How long to measure; each max_batch_size once at least.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it; needs matplotlib.")
def tune(
    *,
    name: str,
    app_path: str,
    device: str | None,
    texts: Sequence[str],
    seconds: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path)
    task = _model_task(app, name)
    device = device or choose_devices(get_installation(app).settings.devices)[0]
    report = tuned(
        task, device, texts or paragraphs(), seconds, lambda line: click.echo(line, err=True)
    )
    click.echo(json.dumps(report)) if as_json else _print(report)
    if plot is not None:
        _draw(report, plot)


def tuned(
    task: ModelTask,
    device: str,
    texts: Sequence[Any],
    seconds: float,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures the model of a task.

    Args:
        task: Whose model it is.
        device: As torch spells it.
        texts: Of the items of its jobs.
        seconds: How long.
        report: Called with lines that say how far it is.

    Returns:
        What JSON shows: `rows` of `Case.row`; `left_out`, the number of pairs that were not
        measured; `recommended` limits; and `fits_tokens`, the largest forward pass that fitted into
        memory, None if all passes did.

    Raises:
        StartError: None of the texts is fit to run.
    """
    report(f"loading {task.name} on {device}")
    model = load_model(task, device)
    prepared = prepare(model, sample_items(model, texts), sample_keywords(model))
    items = [each for each in prepared if not isinstance(each, NON_VALUES)]
    if not items:
        raise StartError(f"model {task.name!r}: none of {len(texts)} texts is fit to run")
    grid = Grid(model, items, device, find_memory(device))
    cases = grid.run(SIZES, TOKENS, seconds, _Progress(seconds, report))
    fits = None
    if any(case.out_of_memory for case in cases):
        fits = max((case.largest_pass for case in cases if not case.out_of_memory), default=0)
    best = recommend(cases, fits)
    return {
        "model": task.name,
        "device": device,
        "items": len(items),
        "mean_tokens": round(sum(map(model.tokens, items)) / len(items), 1),
        "rows": [case.row() for case in cases],
        "left_out": grid.left_out,
        "fits_tokens": fits,
        "recommended": {
            "max_batch_size": best.max_batch_size,
            "max_batch_tokens": best.max_batch_tokens or None,
        },
    }


class _Progress:
    """A line for each case, and later one a second."""

    def __init__(self, seconds: float, report: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._report = report
        self._began_s = time.monotonic()
        self._told_s = 0.0

    def __call__(self, case: Case) -> None:
        now_s = time.monotonic()
        if len(case.rates) > 1 and now_s - self._told_s < 1:
            return
        self._told_s = now_s
        rate = "out of memory" if case.out_of_memory else f"{case.rates[-1]:,.1f} items/s"
        self._report(
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
        console.print(f"{report['left_out']} more pairs had no time: give more --seconds.")
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
