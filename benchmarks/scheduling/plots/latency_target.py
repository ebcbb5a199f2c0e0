"""A latency target: smaller batches for quicker answers, at a cost of throughput."""

from typing import Any

from batchery_worker.job import Lane, Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, MS_PER_S, TASK, Arrival, JobKind
from benchmarks.scheduling.plots.canvas import INK, WITH, WITHOUT
from benchmarks.scheduling.plots.runs import (
    DEVICE,
    Figures,
    percentile_ms,
    poisson,
    simulated,
)

#: Batches so large that live jobs suffer: 340 ms, in one pass.
BATCH_SIZE = 64
WIDE = Fleet(1, ServiceTime(DEVICE.service.pass_ms, DEVICE.service.item_ms))
CAPACITY_PER_S = WIDE.capacity_per_s(BATCH_SIZE)

TARGETS_MS = (100, 150, 200, 300, 400)
LIVE_SHARE = 0.1
SECONDS = 60.0

#: Jobs count that come after so many seconds: before, the scheduler learns what batches cost.
WARM_S = 5.0


def measured(scale: float) -> Figures:
    """What is drawn: latency of live jobs and items per second of all, for each target.

    Args:
        scale: Of the time.
    """
    seconds = WARM_S + SECONDS * scale
    live = poisson(LIVE_SHARE * CAPACITY_PER_S, seconds, JobKind({Lane("high"): 1.0}))
    bulk = [Arrival(0.0, TASK, Lane("low"))] * round(CAPACITY_PER_S * seconds)
    rows = []
    for target_ms in (*TARGETS_MS, None):
        limits = Limits(BATCH_SIZE, target_s=target_ms and target_ms / MS_PER_S)
        done = simulated(RealScheduler(DEFAULT_SHARES), bulk + live, fleet=WIDE, limits=limits)
        warm = [each for each in done if each.job.time_s >= WARM_S]
        quick = [each for each in warm if each.job.lane.priority_class == "high"]
        ended = sum(WARM_S <= each.done_s < seconds for each in done)
        row = {"target_ms": target_ms, "p50_ms": percentile_ms(quick, 50)}
        row["p99_ms"] = percentile_ms(quick, 99)
        row["items_per_s"] = round(ended / (seconds - WARM_S), 1)
        rows.append(row)
    return {"rows": rows}


def draw(figure: Any, found: Figures) -> str:
    """Draws latency and throughput by target; returns the title."""
    latency, rate = figure.subplots(1, 2)
    *rows, without = found["rows"]
    targets = [row["target_ms"] for row in rows]
    latency.plot(targets, targets, ":", color=INK, linewidth=1.5)
    latency.annotate("the target", (300, 300), (4, -14), textcoords="offset points")
    latency.set_title("live jobs, p99 of the latency in ms", loc="left")
    rate.set_title("live and bulk, items/s", loc="left")
    for axes, name in ((latency, "p99_ms"), (rate, "items_per_s")):
        axes.plot(targets, [row[name] for row in rows], "o-", color=WITH)
        axes.axhline(without[name], color=WITHOUT, linestyle="--")
        axes.annotate(
            "without a target",
            (targets[0], without[name]),
            (0, 5),
            textcoords="offset points",
            color=WITHOUT,
        )
        axes.set_xlabel("target_latency_ms")
        axes.set_xticks(targets)
        axes.set_ylim(0, without[name] * 1.2)
    return "A smaller target makes batches smaller: live jobs are quicker, bulk is slower"
