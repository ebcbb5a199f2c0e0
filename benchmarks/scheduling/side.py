"""One checkout of the project: its worker, with bulk that waits without end, and live jobs."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery

from benchmarks.engine.target import Target
from benchmarks.engine.texts import read_texts
from benchmarks.engine.worker import GRACE_S, WholeSystem
from benchmarks.scheduling.arrivals import STRETCH_S, Answer, LiveClient, Stretch, arrivals
from benchmarks.scheduling.bulk import Bulk, Order, Seen
from benchmarks.scheduling.messages import Template, body_of

#: Folders of a checkout that Python looks for packages in.
FOLDERS = ("common", "producer", "worker")

QUEUE = "embed"

#: Priorities of bulk and live.
BULK, LIVE = 9, 0

#: Workload of the bulk jobs, and how many distinct texts they have.
WORKLOAD, TEXTS = "log-normal", 2048

#: The texts of live jobs and of full passes, with their lengths in tokens.
LIVE_WORKLOAD = "uniform 16"
FULL_WORKLOAD, FULL_TOKENS = "uniform 128", 128

#: Bulk texts that wait in Redis, at least; and jobs, whatever they carry: more than a worker takes.
DEPTH_ITEMS, DEPTH_JOBS = 4096, 512

#: Lonely jobs of each kind that are measured, and those before them that are not.
LONELY, LONELY_WARM = 20, 5

#: How long bulk runs before the clock starts, in seconds.
WARM_S = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, the same for both checkouts."""

    target: Target
    #: Seconds with live jobs of each round, and arrivals a second.
    seconds: float
    live_per_s: float
    #: Items of each bulk job; 1 is one text, not a list of one.
    per_job: int
    #: Passes that the device computes side by side.
    streams: int
    seed: int

    @property
    def stretch_s(self) -> float:
        """Length of a stretch: bulk runs many batches in it."""
        return STRETCH_S * max(1.0, self.per_job / self.target.batch_size)


@dataclass(frozen=True, slots=True)
class Round:
    """What one worker did in one round."""

    #: Device time of lonely batches that are one full pass on each stream, in ms.
    pass_ms: float
    #: The same as the worker's cost model has it; None while it has none.
    modelled_pass_ms: float | None
    budget_tokens: int
    #: Latencies of live jobs with no bulk behind them, in ms.
    lonely_ms: Sequence[float]
    #: Median device time of those.
    lonely_forward_ms: float
    stretches: Sequence[Stretch]
    bulk: Seen
    #: What the worker counted.
    figures: Any


def streams_of(device: str) -> int:
    """Passes that a device computes side by side: one per thread of torch, on a CPU."""
    if device.partition(":")[0] != "cpu":
        return 1
    ask = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.run(ask, check=True, capture_output=True, text=True).stdout)


@contextlib.contextmanager
def started(checkout: Path | None, target: Target) -> Iterator[WholeSystem]:
    """A Redis, and a worker of another checkout, or of this one; both end with the block."""
    path = os.environ.get("PYTHONPATH", "")
    if checkout is not None:
        folders = [str(checkout.resolve() / each) for each in FOLDERS]
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [path])])
    try:
        system = WholeSystem(target)
    finally:
        if path:
            os.environ["PYTHONPATH"] = path
        else:
            os.environ.pop("PYTHONPATH", None)
    try:
        yield system
    finally:
        system.stop()


def run_round(checkout: Path | None, plan: Plan, number: int) -> Round:
    """Starts a worker, measures it, ends it.

    Args:
        checkout: Folder of the project; None for the code that runs here.
        plan: What to do.
        number: Of the round; live jobs come at the same times in the same round.
    """
    with started(checkout, plan.target) as system:
        system.wait_ready()
        budget = int(_load_model(stats_of(system.app))["max_batch_tokens"])
        pass_ms, lonely = asyncio.run(_lonely(system, plan, budget))
        bulk = Bulk(_order(system, plan))
        try:
            stretches = asyncio.run(_stretches(system, plan, number))
            seen = bulk.stop()
        finally:
            bulk.kill()
        figures = stats_of(system.app)
    return Round(
        pass_ms=pass_ms,
        modelled_pass_ms=_modelled_ms(_load_model(figures), plan.streams, budget),
        budget_tokens=budget,
        lonely_ms=[each.latency_ms for each in lonely],
        lonely_forward_ms=median(float(each.info["forward_ms"]) for each in lonely),
        stretches=stretches,
        bulk=seen,
        figures=figures["pool"],
    )


def _order(system: WholeSystem, plan: Plan) -> Order:
    texts = read_texts(WORKLOAD, max(TEXTS, 8 * plan.per_job), plan.target.folder)
    if plan.per_job == 1:
        items, bodies = None, [body_of(text) for text in texts]
    else:
        items = plan.per_job
        cuts = range(0, len(texts) - items + 1, items)
        bodies = [body_of(texts[cut : cut + items]) for cut in cuts]
    template = Template.of(system.message(), QUEUE, QUEUE, BULK, items=items)
    depth = max(DEPTH_JOBS, DEPTH_ITEMS // plan.per_job)
    return Order(system.url, template, bodies, plan.per_job, depth)


async def _lonely(system: WholeSystem, plan: Plan, budget: int) -> tuple[float, list[Answer]]:
    """Device time of a full pass on each stream, and the answers of live jobs, all on their own."""
    count = plan.streams * (budget // FULL_TOKENS)
    full = body_of(read_texts(FULL_WORKLOAD, count, plan.target.folder))
    live = _live_bodies(plan)
    message = system.message()
    of_pass = Template.of(message, QUEUE, QUEUE, LIVE, items=count)
    of_live = Template.of(message, QUEUE, QUEUE, LIVE)
    passes_ms, answers = [], []
    async with LiveClient(system.url) as client:
        for number in range(LONELY_WARM + LONELY):
            passes_ms.append((await client.call(of_pass, full)).info["forward_ms"])
            answers.append(await client.call(of_live, live[number]))
    return median(passes_ms[LONELY_WARM:]), answers[LONELY_WARM:]


async def _stretches(system: WholeSystem, plan: Plan, number: int) -> list[Stretch]:
    """Bulk without and with live jobs, in turn."""
    template = Template.of(system.message(), QUEUE, QUEUE, LIVE)
    bodies, made = _live_bodies(plan), []
    turns = max(1, round(plan.seconds / plan.stretch_s))
    seconds = plan.seconds / turns
    await asyncio.sleep(WARM_S)
    async with LiveClient(system.url) as client:
        for turn in range(turns):
            due_s = arrivals(plan.live_per_s, seconds, f"{plan.seed} {number} {turn}")
            # To and fro, so that a machine that slows down slows both.
            first, second = ([], due_s) if turn % 2 == 0 else (due_s, [])
            made.append(await client.stretch(template, bodies, first, seconds))
            made.append(await client.stretch(template, bodies, second, seconds))
    # Until the results of the last batch are read.
    await asyncio.sleep(1.0)
    return made


def _live_bodies(plan: Plan) -> list[str]:
    texts = read_texts(LIVE_WORKLOAD, LONELY_WARM + LONELY, plan.target.folder)
    return [body_of(text) for text in texts]


def stats_of(app: Celery) -> Any:
    """What the only worker of an app says of itself.

    Raises:
        SystemExit: It does not answer.
    """
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s:
        answer: Any = app.control.inspect(timeout=GRACE_S, limit=1).stats()
        if answer:
            return next(iter(answer.values()))
    raise SystemExit("the worker does not say its figures")


def _load_model(stats: Any) -> Any:
    (device,) = stats["pool"]["devices"].values()
    return device["models"][QUEUE]


def _modelled_ms(model: Any, streams: int, budget: int) -> float | None:
    """What the worker's own cost model expects of a full pass on each stream."""
    if "token_us" not in model:
        return None
    items = streams * (budget // FULL_TOKENS)
    tokens_us = model["token_us"] * items * FULL_TOKENS + model.get("item_us", 0.0) * items
    return float(tokens_us / 1e3 + model["pass_ms"] * streams)
