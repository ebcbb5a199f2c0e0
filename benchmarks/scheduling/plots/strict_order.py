"""Strict order: the highest class first, with and without ageing, beside shares."""

import math
from collections.abc import Sequence
from itertools import takewhile
from random import Random
from statistics import fmean
from typing import Any

from batchery_worker.job import Lane
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, JobKind, arrivals, day_times
from benchmarks.scheduling.plots.canvas import THIRD, WITH, WITHOUT
from benchmarks.scheduling.plots.runs import (
    CAPACITY_PER_S,
    SEED,
    Done,
    Figures,
    poisson,
    simulated,
)

#: Mean load of the class high, whose rate is a sine: half more at noon, half less at midnight.
HIGH_LOAD = 0.62
#: Of the class low, the same all day.
LOW_LOAD = 0.3
DAY_S = 240.0
AGEING_S = 10.0

#: Width of a step, in seconds.
STEP_S = 4.0

#: Name -> `ageing_s` of the scheduler.
WAYS = {"shares": None, "ageing": AGEING_S, "strict": math.inf}


def measured(scale: float) -> Figures:
    """What is drawn: mean latency of the jobs that come in each step of a day, in seconds.

    Args:
        scale: Of the day.
    """
    day_s = DAY_S * scale
    random = Random(SEED)
    times_s = day_times(HIGH_LOAD * CAPACITY_PER_S, day_s, random)
    today = takewhile(lambda each: each < day_s, times_s)
    jobs = list(arrivals(today, JobKind({Lane("high"): 1.0}), random))
    jobs += poisson(LOW_LOAD * CAPACITY_PER_S, day_s, JobKind({Lane("low"): 1.0}), SEED + 1)
    found: Figures = {"ageing_s": AGEING_S, "step_s": STEP_S}
    for name, ageing_s in WAYS.items():
        done = simulated(RealScheduler(DEFAULT_SHARES, ageing_s=ageing_s), jobs)
        found[name] = {
            each: _means_s([one for one in done if one.job.lane.priority_class == each])
            for each in ("high", "low")
        }
    return found


def _means_s(done: Sequence[Done]) -> list[float]:
    steps: dict[int, list[float]] = {}
    for each in sorted(done, key=lambda one: one.job.time_s):
        steps.setdefault(int(each.job.time_s / STEP_S), []).append(each.latency_ms / 1e3)
    return [round(fmean(step), 3) for step in steps.values()]


def draw(figure: Any, found: Figures) -> str:
    """Draws how long jobs take by the time of day; returns the title."""
    panels = figure.subplots(1, 2)
    lines = (
        ("shares", WITHOUT, "--", "shares"),
        ("strict", THIRD, "-.", "strict, without ageing"),
        ("ageing", WITH, "-", f"strict, ageing_s = {found['ageing_s']:g}"),
    )
    for axes, name in zip(panels, ("high", "low"), strict=True):
        for way, colour, style, label in lines:
            row = found[way][name]
            times_s = [found["step_s"] * (step + 0.5) for step in range(len(row))]
            axes.plot(times_s, row, style, color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.set_title(f"class {name}: mean latency in s", loc="left")
        axes.set_xlabel("when a job came, in s")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return "In strict order high never waits for low; ageing limits how long low waits"
