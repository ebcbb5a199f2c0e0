"""What is told of a comparison: figures in JSON, and tables of them. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from batchery_worker.job import Lane
from batchery_worker.simulator.devices import MS_PER_S
from batchery_worker.simulator.outcome import LaneOutcome, SimulatedRun, percentile

#: Percentiles of the latency that are told.
PERCENTILES = (50, 95, 99)

#: Maximum number of tenants in a table; JSON has all of them.
MAX_TENANTS = 12

Figures = dict[str, Any]


def figures(
    name: str,
    outcome: SimulatedRun,
    shares: Mapping[str, float],
    target_s: float,
    patient: Collection[str],
) -> Figures:
    """What JSON shows of one policy.

    Args:
        name: Of the policy.
        outcome: What became of the jobs.
        shares: Of each class.
        target_s: Wanted latency.
        patient: Classes that have no target. They do not count for the latency of all.

    Returns:
        Times are in milliseconds, shares from 0 to 1; None stands for what there is not.
    """
    every = outcome.by(lambda _: "all").get("all", LaneOutcome())
    hurried = outcome.by(lambda _: "all", patient).get("all", LaneOutcome())
    return {
        "policy": name,
        "items_per_s": round(outcome.items_per_s, 1),
        "utilisation": round(outcome.utilisation, 4),
        "batches": outcome.batches,
        "batch_items": round(outcome.batch_items, 2),
        **_latency(hurried),
        "missed": _share(hurried.missed(target_s), hurried.jobs),
        "deadlines_missed": _share(every.late, every.with_deadline),
        "shed": _share(every.shed, every.jobs),
        "done": outcome.done,
        "left": every.left,
        "rerun": outcome.rerun,
        "fairness": _rounded(outcome.fairness(shares)),
        "classes": _classes(outcome, shares, target_s, patient),
        "tenants": _group(outcome, lambda lane: lane.tenant, target_s, patient),
    }


def _classes(
    outcome: SimulatedRun, shares: Mapping[str, float], target_s: float, patient: Collection[str]
) -> dict[str, Figures]:
    """The classes, with what they got while jobs of all lanes waited, and what was their share."""
    classes = _group(outcome, _name_class, target_s, patient)
    contended = {name: each.contended_s for name, each in outcome.by(_name_class).items()}
    total_s, total_share = sum(contended.values()), sum(shares[name] for name in classes)
    for name, row in classes.items():
        row["share"] = round(shares[name] / total_share, 4)
        row["share_got"] = _share(contended[name], total_s) if outcome.is_contended else None
    return classes


def _name_class(lane: Lane) -> str:
    return lane.priority_class


def _group(
    outcome: SimulatedRun, group: Callable[[Lane], str], target_s: float, patient: Collection[str]
) -> dict[str, Figures]:
    hurried = outcome.by(group, patient)
    missed = {name: _share(each.missed(target_s), each.jobs) for name, each in hurried.items()}
    return {
        name: {
            "jobs": each.jobs,
            **_latency(each),
            "missed": missed.get(name),
            "deadlines_missed": _share(each.late, each.with_deadline),
            "shed": _share(each.shed, each.jobs),
            "device_s": round(each.device_s, 3),
        }
        for name, each in outcome.by(group).items()
    }


def _latency(lane: LaneOutcome) -> Figures:
    ordered = sorted(lane.latencies_s)
    found = {each: percentile(ordered, each / 100) for each in PERCENTILES}
    return {
        f"p{each}_ms": None if value is None else round(value * MS_PER_S, 2)
        for each, value in found.items()
    }


def _share(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def tables(policies: Sequence[Figures]) -> list[Table]:
    """Tables for people: one of the policies; of their classes and tenants, if there are several.

    Args:
        policies: Of `figures`, over the same jobs.
    """
    made = [_policy_table(policies)]
    for group, label in (("classes", "class"), ("tenants", "tenant")):
        names = list(policies[0][group])
        if len(names) > 1:
            made.append(_group_table(policies, group, label, names[:MAX_TENANTS]))
    return made


def _policy_table(policies: Sequence[Figures]) -> Table:
    # Broken by hand, so that it fits into 80 columns.
    heads = ["policy", "items/s", "busy", "items/\nbatch", "p50\nms", "p95\nms", "p99\nms"]
    has_deadlines = any(each["deadlines_missed"] is not None for each in policies)
    heads += ["missed\ntarget", *(["missed\ndeadline"] if has_deadlines else []), "given\nup"]
    table = _table(*heads, "fair-\nness")
    for each in policies:
        table.add_row(
            each["policy"],
            f"{each['items_per_s']:,.0f}",
            _percent(each["utilisation"], 0),
            f"{each['batch_items']:.1f}",
            *(_ms(each[f"p{percent}_ms"]) for percent in PERCENTILES),
            _percent(each["missed"]),
            *([_percent(each["deadlines_missed"])] if has_deadlines else []),
            _percent(each["shed"]),
            "-" if each["fairness"] is None else f"{each['fairness']:.2f}",
        )
    return table


def _group_table(
    policies: Sequence[Figures], group: str, label: str, names: Sequence[str]
) -> Table:
    is_class = group == "classes"
    heads = ["policy", label, "jobs", "p50\nms", "p95\nms", "p99\nms", "missed\ntarget"]
    table = _table(*heads, "given\nup", *(["share", "got"] if is_class else []), left=2)
    for policy in policies:
        for name in names:
            row = policy[group][name]
            table.add_row(
                policy["policy"] if name == names[0] else "",
                name or "(none)",
                f"{row['jobs']:,}",
                *(_ms(row[f"p{percent}_ms"]) for percent in PERCENTILES),
                _percent(row["missed"]),
                _percent(row["shed"]),
                *([_percent(row["share"], 0), _percent(row["share_got"], 0)] if is_class else []),
                end_section=name == names[-1],
            )
    return table


def _table(*heads: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right", no_wrap=True)
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"
