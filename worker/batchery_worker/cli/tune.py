"""`batchery tune`: which `max_batch_size` suits a model on this machine."""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics
from typing import Any, TextIO

import click
from celery import Celery

from batchery.cli.app import DEFAULT_APP, SECONDS, load_app
from batchery.device_names import device_type
from batchery.errors import SettingsError, StartError
from batchery.execution.batch import compute, prepare
from batchery.execution.bisect_failures import NON_VALUES
from batchery.installation import get_installation
from batchery.model import Model
from batchery.model_task import ModelTask
from batchery_worker.batching.planner import MIN_STREAM_TOKENS, PASS_TOKENS, plan
from batchery_worker.batching.token_budget import TokenBudget
from batchery_worker.device.loading import find_memory, load_model, sample_items, sample_keywords
from batchery_worker.device.served_model import DEFAULT_MAX_BATCH_TOKENS
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.memory import Memory

#: A batch of one shows what batching is worth.
SIZES = (1, 4, 16, 32, 64, 128, 256)

#: Trials of each size, of which the median counts.
ROUNDS = 3

#: Items of the pass that warms up.
WARM_UP_ITEMS = 16

#: Share of the best rate that is given away for smaller batches. They take less memory, and each
#: job waits for fewer others.
SPARED_SHARE = 0.05

HELP = """Find the max_batch_size that suits a model on this machine.

Computes the same texts in batches of several sizes, three times, and takes the medians; says on
standard error how far it is. Give texts of your own: the best size depends on their lengths. Passes
are cut as in a worker, and what memory teaches is printed as max_batch_tokens. Needs neither Redis
nor a worker. A worker that runs on the device meanwhile makes the figures worse.

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


@dataclass
class Bench:
    """Measures one model over the same items.

    Attributes:
        model: Loaded.
        items: Prepared, and all of them fit to run; at least one.
        device: As torch spells it.
        budget: Of tokens of a pass; learns from passes that run out of memory.
        memory: Of that device.
        clock: Seconds, on any scale.
    """

    model: Model
    items: Sequence[Any]
    device: str
    budget: TokenBudget
    memory: Memory
    clock: Callable[[], float] = time.perf_counter

    @cached_property
    def mean_tokens(self) -> float:
        """Of the tokens of an item."""
        return statistics.fmean(max(1, self.model.tokens(each)) for each in self.items)

    def run_all(self, limit_s: float, report: Callable[[str], None]) -> list[dict[str, Any]]:
        """Measures each size `ROUNDS` times, however slow the model: at least a batch each time."""
        # A trial may end after some of the items, which must be like all of them.
        items = random.Random(1).sample(list(self.items), len(self.items))
        self.compute(items[:WARM_UP_ITEMS], WARM_UP_ITEMS)
        trials: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
        for number in range(ROUNDS):
            for size, each in trials.items():
                each.append(self._run(items, size, limit_s / (ROUNDS * len(SIZES))))
                report(f"{number + 1} of {ROUNDS}: batches of {size}: {each[-1][0]:,.1f} items/s")
        return [
            {
                "max_batch_size": size,
                "items_per_s": round(statistics.median(rate for rate, _ in each), 1),
                "padding_waste": round(each[-1][1], 3),
            }
            for size, each in trials.items()
        ]

    def _run(self, items: Sequence[Any], size: int, limit_s: float) -> tuple[float, float]:
        """Computes all items, or as many as there is time for, but at least one batch.

        Returns:
            Items per second, and the share of padding in the computed tokens.
        """
        start = tokens = computed = 0
        self.memory.wait()
        began_s = self.clock()
        while start == 0 or (start < len(items) and self.clock() < began_s + limit_s):
            done = self.compute(items[start : start + size], size)
            tokens, computed, start = tokens + done[0], computed + done[1], start + size
        self.memory.wait()
        # By tokens, because the items of one trial may be longer than those of another.
        rate = tokens / self.mean_tokens / max(self.clock() - began_s, 1e-9)
        return rate, 1 - tokens / max(1, computed)

    def compute(self, items: Sequence[Any], size: int) -> tuple[int, int]:
        """Computes one batch; returns its tokens, and the same with padding."""
        kind = device_type(self.device)

        def cut(lengths: Sequence[int]) -> list[list[int]]:
            return plan(
                *(lengths, self.budget.allows(), size),
                pads=self.model.pads,
                pass_tokens=PASS_TOKENS[kind],
                streams=getattr(self.model, "pass_streams", 1),
                min_stream_tokens=MIN_STREAM_TOKENS[kind],
            )

        keywords = sample_keywords(self.model)
        return compute(self.model, items, keywords, cut, memory=self.budget)[1:]


def recommend(rows: Sequence[Mapping[str, Any]]) -> int:
    """The smallest size whose rate is about as good as the best."""
    enough = (1 - SPARED_SHARE) * max(row["items_per_s"] for row in rows)
    return min(int(row["max_batch_size"]) for row in rows if row["items_per_s"] >= enough)


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
@click.option("--seconds", type=SECONDS, default=60.0, help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def tune(
    *,
    name: str,
    app_path: str,
    device: str | None,
    texts: Sequence[str],
    seconds: float,
    as_json: bool,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path)
    task, settings = _find_model(app, name), get_installation(app).settings
    device = device or choose_devices(settings.devices)[0]
    click.echo(f"loading {name} on {device}", err=True)
    model, texts = load_model(task, device), texts or paragraphs()
    prepared = prepare(model, sample_items(model, texts), sample_keywords(model))
    items = [each for each in prepared if not isinstance(each, NON_VALUES)]
    if not items:
        raise StartError(f"model {name!r}: none of {len(texts)} texts is fit to run")
    default = DEFAULT_MAX_BATCH_TOKENS[device_type(device)]
    budget = TokenBudget(task.max_batch_tokens or settings.max_batch_tokens or default)
    bench = Bench(model, items, device, budget, find_memory(device))
    rows = bench.run_all(seconds, lambda line: click.echo(line, err=True))
    learned = budget.allows()
    report = {
        "model": name,
        "device": device,
        "items": len(items),
        "mean_tokens": round(bench.mean_tokens, 1),
        "rows": rows,
        "recommended": {
            "max_batch_size": recommend(rows),
            "max_batch_tokens": learned if learned < budget.ceiling else None,
        },
    }
    click.echo(json.dumps(report) if as_json else draw(report))


def _find_model(app: Celery, name: str) -> ModelTask:
    tasks = {each.name: each for each in app.tasks.values() if isinstance(each, ModelTask)}
    if name not in tasks:
        there = f"there are {', '.join(sorted(tasks))}" if tasks else "none is"
        raise SettingsError(f"model {name!r}: not configured; {there}")
    return tasks[name]


def draw(report: dict[str, Any]) -> str:
    """The figures, and the settings to copy."""
    what = f"{report['model']} on {report['device']}: {report['items']:,} items"
    lines = [f"{what}, {report['mean_tokens']} tokens on average", ""]
    for row in report["rows"]:
        size, rate, waste = row.values()
        lines.append(f"  batches of {size:>3}  {rate:>10,} items/s, {100 * waste:.0f} % padding")
    lines += ["", "Recommended: the smallest within 5 % of the best."]
    best = report["recommended"].items()
    return "\n".join([*lines, *(f"{name} = {value}" for name, value in best if value)])
