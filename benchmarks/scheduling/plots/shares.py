"""Shares: classes that come and go, and a tenant's only job behind those of another one."""

from collections.abc import Sequence
from typing import Any

from batchery_worker.job import USUAL_LANE, Lane
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, TASK, Arrival
from benchmarks.scheduling.plots.canvas import CLASS_COLOURS, INK, draw_bars
from benchmarks.scheduling.plots.runs import CAPACITY_PER_S, Done, Figures, simulated

#: Class -> when all its jobs come, and for how long they would keep the device busy, in seconds.
HEAPS = {"low": (0.0, 30.0), "normal": (6.0, 14.0), "high": (18.0, 10.0)}

#: Jobs of a tenant before the only one of another.
TENANT_JOBS = 100_000

#: Width of a step of the rates, in seconds.
STEP_S = 1.0

#: How the scheduler sees a job -> how it does.
VIEWS = {"order": lambda job: job._replace(lane=USUAL_LANE), "shares": lambda job: job}


def measured(scale: float) -> Figures:
    """What is drawn.

    Args:
        scale: Of all numbers of jobs.

    Returns:
        For each view: items per second of each class in each step, and how long the only job of
        a tenant took, in seconds.
    """
    heaps = [
        Arrival(at_s * scale, TASK, Lane(name))
        for name, (at_s, busy_s) in HEAPS.items()
        for _ in range(round(busy_s * scale * CAPACITY_PER_S))
    ]
    behind = round(TENANT_JOBS * scale)
    tenants = [Arrival(0.0, TASK, Lane(tenant="large"))] * behind
    tenants.append(Arrival(1.0, TASK, Lane(tenant="small")))
    found: Figures = {"step_s": STEP_S, "tenant_jobs": behind, "came_s": {}}
    found["came_s"] = {name: at_s * scale for name, (at_s, _) in HEAPS.items()}
    for view, as_seen in VIEWS.items():
        done = simulated(RealScheduler(DEFAULT_SHARES), heaps, as_seen=as_seen)
        lone = simulated(RealScheduler(DEFAULT_SHARES), tenants, as_seen=as_seen)
        small_ms = next(each.latency_ms for each in lone if each.job.lane.tenant == "small")
        found[view] = {"items_per_s": _rates(done), "tenant_s": round(small_ms / 1e3, 2)}
    return found


def _rates(done: Sequence[Done]) -> dict[str, list[float]]:
    """Items per second of each class; those of a batch are spread over the time that it ran."""
    steps = int(max(each.done_s for each in done) / STEP_S) + 1
    items = {name: [0.0] * steps for name in DEFAULT_SHARES}
    for each in done:
        row = items[each.job.lane.priority_class]
        for step in range(int(each.began_s / STEP_S), int(each.done_s / STEP_S) + 1):
            inside_s = min(each.done_s, (step + 1) * STEP_S) - max(each.began_s, step * STEP_S)
            row[step] += max(0.0, inside_s) / (each.done_s - each.began_s)
    return {name: [round(each / STEP_S, 1) for each in row] for name, row in items.items()}


def draw(figure: Any, found: Figures) -> str:
    """Draws who has the device, and how long the tenant's job takes; returns the title."""
    order, shares, tenant = figure.subplots(1, 3, width_ratios=[3, 3, 1.7])
    _draw_rates(order, found, "order")
    _draw_rates(shares, found, "shares")
    order.set_title("without: as they came", loc="left")
    shares.set_title("with shares", loc="left")
    order.set_ylabel("items/s")
    shares.set_yticks([])
    times_s = [found[view]["tenant_s"] for view in VIEWS]
    draw_bars(tenant, times_s, [f"{each:.{1 if each < 10 else 0}f} s" for each in times_s])
    tenant.set_title(f"1 job of a tenant\nbehind {found['tenant_jobs']:,}", loc="left")
    return "Each class has its share as soon as it comes, and no tenant waits for another"


def _draw_rates(axes: Any, found: Figures, view: str) -> None:
    rates = found[view]["items_per_s"]
    edges = [found["step_s"] * step for step in range(len(rates["high"]))]
    rows = [rates[name] for name in DEFAULT_SHARES]
    axes.stackplot(edges, rows, colors=CLASS_COLOURS, step="post", linewidth=0)
    total = max(map(sum, zip(*rows, strict=True)))
    for number, name in enumerate(DEFAULT_SHARES):
        _name_area(axes, name, number, rows)
    for name, came_s in found["came_s"].items():
        axes.plot([came_s], [total * 1.04], "v", color=INK, markersize=5, clip_on=False)
        axes.text(came_s, total * 1.09, f" {name}", ha="left", fontsize=10)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, total * 1.25)
    axes.set_xlabel("time in s")


def _name_area(axes: Any, name: str, number: int, rows: Sequence[Sequence[float]]) -> None:
    """Writes the name of a class, and its part, in the middle of where it shares with others."""
    steps = list(zip(*rows, strict=True))
    others = [sum(1 for each in step if each) if step[number] else 0 for step in steps]
    shared = [place for place, count in enumerate(others) if count == max(others)]
    place = shared[len(shared) // 2]
    step = steps[place]
    part = step[number] / sum(step)
    label = name if part > 0.99 else f"{name} {100 * part:.0f} %"
    height = sum(step[:number]) + step[number] / 2
    at_s = STEP_S * (shared[0] + shared[-1] + 1) / 2
    colour = "white" if number == 0 else INK
    axes.text(at_s, height, label, ha="center", va="center", fontsize=10, color=colour)
