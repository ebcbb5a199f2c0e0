"""Small calls first: calls of a few items among messages of many."""

from typing import Any

from batchery_worker.job import Lane
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, TASK, Amount, Arrival, JobKind
from benchmarks.scheduling.plots.canvas import WITH, WITHOUT, draw_times_in_ms
from benchmarks.scheduling.plots.runs import Figures, percentile_ms, poisson, simulated

#: Of the lane of small calls, in items.
THRESHOLD = 8

#: Items of a small call: log-normal.
SMALL_ITEMS = Amount(3, 0.5)
SMALL_PER_S = 5.0

#: So many messages of so many items come at once, and again after so many seconds.
LARGE_JOBS, LARGE_ITEMS, EVERY_S = 16, 64, 20.0

SECONDS = 300.0
PERCENTS = (50, 95)


def _by_size(job: Arrival) -> Arrival:
    return job._replace(lane=Lane(is_large=job.items > THRESHOLD))


def measured(scale: float) -> Figures:
    """What is drawn: latencies of small and of large jobs.

    Args:
        scale: Of the time.
    """
    seconds = SECONDS * scale
    jobs = poisson(SMALL_PER_S, seconds, JobKind(items=SMALL_ITEMS))
    jobs = [job for job in jobs if job.items <= THRESHOLD]
    for number in range(max(1, int(seconds / EVERY_S))):
        jobs += [Arrival(number * EVERY_S, TASK, Lane(), LARGE_ITEMS)] * LARGE_JOBS
    found: Figures = {}
    for name, as_seen in (("without", lambda job: job), ("with", _by_size)):
        done = simulated(RealScheduler(DEFAULT_SHARES), jobs, as_seen=as_seen)
        small = [each for each in done if each.job.items <= THRESHOLD]
        large = [each for each in done if each.job.items > THRESHOLD]
        found[name] = {
            "small": [percentile_ms(small, percent) for percent in PERCENTS],
            "large": [percentile_ms(large, percent) for percent in PERCENTS],
        }
    return found


def draw(figure: Any, found: Figures) -> str:
    """Draws the median and the 95th percentile of both kinds; returns the title."""
    panels = figure.subplots(2, 1, sharex=True)
    for axes, kind in zip(panels, ("small", "large"), strict=True):
        for place, (name, colour) in enumerate((("with", WITH), ("without", WITHOUT))):
            times_ms = found[name][kind]
            axes.plot(times_ms, [place] * len(times_ms), "o-", color=colour)
            for ms, percent in zip(times_ms, PERCENTS, strict=True):
                axes.annotate(
                    f"p{percent} {_said(ms)}",
                    (ms, place),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                )
        axes.set_yticks([0, 1], ["with", "without"])
        axes.set_ylim(-0.5, 1.75)
        axes.set_title(f"{kind} calls", loc="left")
    draw_times_in_ms(panels[1], (30, 100, 300, 1000, 3000, 10_000))
    panels[0].tick_params(bottom=False)
    panels[1].set_xlabel("from arrival to answer")
    before_s, now_s = (found[name]["small"][-1] / 1e3 for name in ("without", "with"))
    return f"95 % of small calls are answered in {now_s:.1f} s instead of {before_s:.1f} s"


def _said(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"
