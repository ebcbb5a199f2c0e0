"""`batchery tune`: which `max_batch_size` suits a model on this machine."""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any, TextIO

import click
from celery import Celery

from batchery.cli.app import DEFAULT_APP, SECONDS, load_app
from batchery.errors import SettingsError, StartError
from batchery.execution.batch import prepare
from batchery.execution.bisect_failures import NON_VALUES
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery_worker.device.start import find_memory
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.serving.loading import load_model, sample_items, sample_keywords
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

#: A batch of one shows what batching is worth.
SIZES = (1, 4, 16, 32, 64, 128, 256)

#: Trials of each size, of which the median counts.
ROUNDS = 3

#: Items of the pass that warms up.
WARM_UP_ITEMS = 16

#: Share of the best rate that is given away for smaller batches. They take less memory, and each
#: job waits for fewer others.
SPARED_SHARE = 0.05


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


def measure(
    served: LoadedModel,
    items: Sequence[Any],
    limit_s: float,
    max_batch_tokens: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Measures each size `ROUNDS` times, however slow the model: at least a batch each time.

    Args:
        served: The model, as a worker has it.
        items: Prepared, and all of them fit to run; at least one.
        limit_s: How long all of it may take, in seconds.
        max_batch_tokens: Of a pass; None for the default of the device.
        clock: Seconds, on any scale.

    Returns:
        For each size `max_batch_size`, `items_per_s` and `padding_waste`.
    """
    mean_tokens = statistics.fmean(max(1, served.model.tokens(each)) for each in items)
    # A trial may end after some of the items, which must be like all of them.
    items = random.Random(1).sample(list(items), len(items))
    keywords = sample_keywords(served.model)

    def run(size: int, items: Sequence[Any], limit_s: float) -> tuple[float, float]:
        """Items per second, and the share of padding; of what there is time for."""
        work = Work(0, served.name, keywords, (), size, max_batch_tokens)
        start = tokens = computed = 0
        began_s = clock()
        while start == 0 or (start < len(items) and clock() < began_s + limit_s):
            done = served.compute(items[start : start + size], work, nullcontext)
            tokens, computed, start = tokens + done[1], computed + done[2], start + size
        # By tokens, because the items of one trial may be longer than those of another.
        rate = tokens / mean_tokens / max(clock() - began_s, 1e-9)
        return rate, 1 - tokens / max(1, computed)

    run(WARM_UP_ITEMS, items[:WARM_UP_ITEMS], 0)
    trials: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for number in range(ROUNDS):
        for size, each in trials.items():
            each.append(run(size, items, limit_s / (ROUNDS * len(SIZES))))
            rate = f"{each[-1][0]:,.1f} items/s"
            click.echo(f"{number + 1} of {ROUNDS}: batches of {size}: {rate}", err=True)
    return [
        {
            "max_batch_size": size,
            "items_per_s": round(statistics.median(rate for rate, _ in each), 1),
            "padding_waste": round(each[-1][1], 3),
        }
        for size, each in trials.items()
    ]


def recommend(rows: Sequence[Mapping[str, Any]]) -> int:
    """The smallest size whose rate is about as good as the best."""
    enough = (1 - SPARED_SHARE) * max(row["items_per_s"] for row in rows)
    return min(int(row["max_batch_size"]) for row in rows if row["items_per_s"] >= enough)


@click.command()
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
    """Find the max_batch_size that suits a model on this machine.

    Computes the same texts in batches of several sizes, three times, and takes the medians; says on
    standard error how far it is. Give texts of your own: the best size depends on their lengths.
    Passes are cut as in a worker, and what memory teaches is printed as max_batch_tokens. Needs
    neither Redis nor a worker. A worker that runs on the device meanwhile makes the figures worse.

    \b
    Exit codes:
      0    measured
      2    could not start: no such app, model or device, or nothing to measure with
      130  interrupted
    """  # noqa: D301 (click looks for this character)
    app = load_app(app_path)
    task, settings = _find_model(app, name), get_installation(app).settings
    device = device or choose_devices(settings.devices)[0]
    click.echo(f"loading {name} on {device}", err=True)
    model, texts = load_model(task, device), texts or paragraphs()
    prepared = prepare(model, sample_items(model, texts), sample_keywords(model))
    items = [each for each in prepared if not isinstance(each, NON_VALUES)]
    if not items:
        raise StartError(f"model {name!r}: none of {len(texts)} texts is fit to run")
    served = LoadedModel(name, model, device, find_memory(device))
    max_batch_tokens = task.max_batch_tokens or settings.max_batch_tokens
    rows = measure(served, items, seconds, max_batch_tokens)
    figures = served.figures()
    learned = figures["max_batch_tokens"] if figures["chosen_by"] == "memory" else None
    mean_tokens = statistics.fmean(map(model.tokens, items))
    report = {
        "model": name,
        "device": device,
        "items": len(items),
        "mean_tokens": round(mean_tokens, 1),
        "rows": rows,
        "recommended": {"max_batch_size": recommend(rows), "max_batch_tokens": learned},
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
