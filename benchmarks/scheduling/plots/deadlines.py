"""Deadlines: how many jobs are late at which load, in which order, and with `shed_late`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import Any

from batchery_worker.job import USUAL_LANE
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, MS_PER_S, TASK, Arrival, day_times
from benchmarks.scheduling.plots.canvas import PALE, THIRD, WITH, WITHOUT
from benchmarks.scheduling.plots.runs import (
    CAPACITY_PER_S,
    SEED,
    Done,
    Figures,
    simulated,
)

#: A job has one of them, by chance.
DEADLINES_S = (0.5, 3.0)

LOADS_PERCENT = (50, 70, 80, 90, 100, 110, 125, 150)

#: The rate of the jobs is a sine of this period, half above its mean and half below.
SWING_S = 8.0

#: Jobs count that come in the swings after the first one.
SWINGS = 3


def _undated(job: Arrival) -> Arrival:
    return job._replace(deadline_s=None)


#: Name -> whether late jobs are given up, and what the scheduler sees of a job.
WAYS: Mapping[str, tuple[bool, Callable[[Arrival], Arrival]]] = {
    "order": (False, _undated),
    "edf": (False, lambda job: job),
    "shed": (True, lambda job: job),
}


def measured(scale: float) -> Figures:
    """What is drawn: the share of jobs that miss their deadline, in per cent, at each load.

    Args:
        scale: Of the length of a swing.
    """
    swing_s = SWING_S * scale
    found: Figures = {"loads": list(LOADS_PERCENT), **{name: [] for name in WAYS}}
    for load in LOADS_PERCENT:
        jobs = _jobs(load, swing_s)
        for name, (sheds_late, as_seen) in WAYS.items():
            scheduler = RealScheduler(DEFAULT_SHARES, sheds_late=sheds_late)
            done = simulated(scheduler, jobs, as_seen=as_seen)
            found[name].append(_missed_percent(jobs, done, swing_s))
    return found


def _jobs(load_percent: float, swing_s: float) -> list[Arrival]:
    random = Random(SEED)
    # So long that those who count are followed by others until they are late.
    until_s = SWINGS * swing_s + max(DEADLINES_S)
    times_s = day_times(CAPACITY_PER_S * load_percent / 100, swing_s, random)
    return [
        Arrival(time_s, TASK, USUAL_LANE, deadline_s=random.choice(DEADLINES_S))
        for time_s in takewhile(lambda each: each < until_s, times_s)
    ]


def _missed_percent(jobs: Sequence[Arrival], done: Sequence[Done], swing_s: float) -> float:
    def counts(job: Arrival) -> bool:
        return swing_s <= job.time_s < SWINGS * swing_s

    in_time = sum(
        each.latency_ms <= (each.job.deadline_s or 0.0) * MS_PER_S
        for each in done
        if counts(each.job)
    )
    return round(100 * (1 - in_time / sum(map(counts, jobs))), 2)


def draw(figure: Any, found: Figures) -> str:
    """Draws what is late by load; returns the title."""
    axes = figure.subplots()
    loads = found["loads"]
    over = range(100, max(loads) + 1)
    axes.fill_between(over, [100 - 1e4 / load for load in over], color=PALE, linewidth=0)
    axes.text(149, 4, "more than the device can do", ha="right", fontsize=10)
    for name, colour, marks, label in (
        ("order", WITHOUT, "s--", "in the order of arrival"),
        ("edf", THIRD, "^-", "earliest deadline first"),
        ("shed", WITH, "o-", "the same, with shed_late"),
    ):
        axes.plot(loads, found[name], marks, color=colour, label=label)
    axes.legend()
    axes.set_xticks(loads, [f"{load} %" for load in loads])
    axes.set_xlabel("load, of what the device can do in full batches")
    axes.set_ylabel("jobs that miss\ntheir deadline, %")
    enough = max(load for load, missed in zip(loads, found["edf"], strict=True) if missed < 1)
    return f"Earliest deadline first is enough up to {enough} % load; beyond it, add shed_late"
