"""Urgent batches: live jobs between the passes of long bulk messages."""

from typing import Any

from batchery_worker.job import Lane
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, TASK, Arrival, JobKind
from benchmarks.scheduling.plots.canvas import WITH, WITHOUT, draw_bars, draw_times_in_ms
from benchmarks.scheduling.plots.runs import (
    CAPACITY_PER_S,
    Figures,
    percentile_ms,
    poisson,
    simulated,
)

#: Items of a message of the bulk, of which there is always another one.
BULK_ITEMS = 256

LIVE_PER_S = 2.0
SECONDS = 200.0

#: Percentiles of the line of a distribution.
PERCENTS = (*range(1, 100), 99.5)


class Uninterrupted(RealScheduler):
    """The scheduler without urgent batches."""

    takes_urgent = False


def measured(scale: float) -> Figures:
    """What is drawn: latencies of live jobs at each percentile, and items per second of bulk.

    Args:
        scale: Of the time.
    """
    seconds = SECONDS * scale
    live = poisson(LIVE_PER_S, seconds, JobKind({Lane("high"): 1.0}))
    heap = Arrival(0.0, TASK, Lane("low"), BULK_ITEMS)
    bulk = [heap] * round(1.2 * CAPACITY_PER_S * seconds / BULK_ITEMS)
    found: Figures = {"bulk_items": BULK_ITEMS, "live_per_s": LIVE_PER_S}
    for name, scheduler in (
        ("without", Uninterrupted(DEFAULT_SHARES)),
        ("with", RealScheduler(DEFAULT_SHARES)),
    ):
        done = simulated(scheduler, bulk + live)
        quick = [each for each in done if each.job.lane.priority_class == "high"]
        heavy = [each for each in done if each.job.items > 1 and each.done_s < seconds]
        items = sum(each.job.items for each in heavy)
        found[name] = {
            "latency_ms": [percentile_ms(quick, percent) for percent in PERCENTS],
            "bulk_items_per_s": round(items / max(each.done_s for each in heavy), 1),
        }
    return found


def draw(figure: Any, found: Figures) -> str:
    """Draws how long live jobs take, and what is left for bulk; returns the title."""
    live, bulk = figure.subplots(1, 2, width_ratios=[3, 1.2])
    for name, colour, side in (("without", WITHOUT, "right"), ("with", WITH, "left")):
        row = found[name]["latency_ms"]
        live.plot(row, PERCENTS, color=colour)
        beside = (-10, 6) if side == "right" else (10, -10)
        live.annotate(
            f"{name}\nurgent batches",
            (row[PERCENTS.index(60)], 60),
            beside,
            textcoords="offset points",
            color=colour,
            ha=side,
        )
    draw_times_in_ms(live, (30, 100, 300, 1000, 3000))
    live.set_xlabel("from arrival to answer")
    live.set_title("live jobs, % answered by then", loc="left")
    live.set_ylim(0, 103)
    rates = [found[name]["bulk_items_per_s"] for name in ("without", "with")]
    draw_bars(bulk, rates, [f"{each:.0f}" for each in rates])
    bulk.set_title("bulk, items/s", loc="left")
    before_s, now_s = (
        found[name]["latency_ms"][PERCENTS.index(95)] / 1e3 for name in ("without", "with")
    )
    return (
        f"95 % of live jobs are answered in {now_s:.2f} s instead of {before_s:.1f} s;"
        f" bulk keeps {100 * rates[1] / rates[0]:.0f} %"
    )
