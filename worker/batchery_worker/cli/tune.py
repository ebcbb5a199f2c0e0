"""`batchery tune`: which `max_batch_size` suits a model on this machine."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
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


def read_texts(_: click.Context, __: click.Parameter, file: TextIO) -> list[str]:
    """The lines of a file."""
    try:
        with file:
            return [text for line in file if (text := line.strip())]
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file.name}: no text in UTF-8: {error}") from None


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
    required=True,
    help="A text per line, such as the model will get: the best size depends on their lengths.",
)
@click.option("--seconds", type=SECONDS, default=60.0, help="How long to measure.")
def tune(
    *, name: str, app_path: str, device: str | None, texts: Sequence[str], seconds: float
) -> None:
    """Find the max_batch_size that suits a model on this machine.

    Computes the same texts in batches of several sizes, three times, and takes the medians; says on
    standard error how far it is. Passes are cut as in a worker, and what memory teaches is printed
    as max_batch_tokens. Needs neither Redis nor a worker. A worker that runs on the device
    meanwhile makes the figures worse.

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
    model = load_model(task, device)
    prepared = prepare(model, sample_items(model, texts), sample_keywords(model))
    items = [each for each in prepared if not isinstance(each, NON_VALUES)]
    if not items:
        raise StartError(f"model {name!r}: none of {len(texts)} texts is fit to run")
    served = LoadedModel(name, model, device, find_memory(device))
    rows = measure(served, items, seconds, task.max_batch_tokens or settings.max_batch_tokens)
    mean_tokens = statistics.fmean(map(model.tokens, items))
    click.echo(f"{name} on {device}: {len(items):,} items, {mean_tokens:.1f} tokens on average\n")
    for row in rows:
        size, rate, waste = row.values()
        line = f"  batches of {size:>3}  {rate:>10,} items/s, {100 * waste:.0f} % padding"
        click.echo(line)
    click.echo("\nRecommended: the smallest within 5 % of the best.")
    click.echo(f"max_batch_size = {recommend(rows)}")
    figures = served.figures()
    if figures["chosen_by"] == "memory":
        click.echo(f"max_batch_tokens = {figures['max_batch_tokens']}")


def _find_model(app: Celery, name: str) -> ModelTask:
    tasks = {each.name: each for each in app.tasks.values() if isinstance(each, ModelTask)}
    if name not in tasks:
        there = f"there are {', '.join(sorted(tasks))}" if tasks else "none is"
        raise SettingsError(f"model {name!r}: not configured; {there}")
    return tasks[name]
