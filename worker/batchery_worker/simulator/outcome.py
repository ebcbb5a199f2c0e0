"""What became of the jobs: counted while the simulation runs; as figures, tables and a picture."""

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from batchery.errors import StartError
from batchery_worker.job import Batch, Lane
from batchery_worker.simulator.policies import SimulatedJob
from batchery_worker.simulator.workload import MS_PER_S, Arrival

#: Share of the work in which jobs of all lanes must have waited: of less, shares say nothing.
MIN_CONTENDED_SHARE = 0.02

#: Percentiles of the latency that are told.
PERCENTILES = (50, 95, 99)

#: Maximum number of tenants in a table; JSON has all of them.
MAX_TENANTS = 12

Figures = dict[str, Any]

#: Colours of a policy that is ours, and of the others.
OURS, OTHERS = "#c2410c", "#64748b"

#: Height of the bar of one policy, and of all else, in inches.
ROW_INCHES, REST_INCHES = 0.45, 1.4


class Sent(NamedTuple):
    """A batch on a device."""

    batch: Batch[Arrival]
    sent_s: float
    #: Whether all lanes still had waiting jobs when it left: only then do the shares decide.
    contended: bool
    #: Its tasks and lanes: of those that have the same ones, all or none may be interrupted.
    flows: frozenset[tuple[str, Lane]] = frozenset()


@dataclass(slots=True)
class LaneOutcome:
    """What became of the jobs of one lane, or of several together."""

    #: From arrival to result, of each job that was done, in seconds.
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    #: From arrival to the end of the first step, where a job has steps, in seconds.
    first_s: "array[float]" = field(default_factory=lambda: array("d"))
    items: int = 0
    device_s: float = 0.0
    #: The same, of batches after which jobs of all lanes waited.
    contended_s: float = 0.0
    #: Jobs that were done after their deadline, or given up with one.
    late: int = 0
    with_deadline: int = 0
    #: Jobs that the policy gave up.
    shed: int = 0
    #: Jobs that came and were neither done nor given up.
    left: int = 0

    @property
    def jobs(self) -> int:
        """How many came."""
        return len(self.latencies_s) + self.shed + self.left

    def missed(self, target_s: float) -> int:
        """How many were not done within the target; those that were never done count, too."""
        return sum(each > target_s for each in self.latencies_s) + self.shed + self.left


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that is not below this share of all values; None if there are none.

    Args:
        ordered: Values from the smallest to the largest.
        share: Above 0, up to 1.
    """
    # Rounded first: 0.95 * 100 must not be a little more than 95.
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)] if ordered else None


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index of fairness: 1 if all have the same, 1/n if one has all; None if nobody has any.

    R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness, DEC TR-301, 1984.
    """
    squares = sum(each * each for each in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


@dataclass(slots=True)
class SimulatedRun:
    """What became of all jobs."""

    lanes: dict[Lane, LaneOutcome] = field(default_factory=dict)
    #: When the last batch was back.
    end_s: float = 0.0
    #: Time that devices lived until then, and that they worked; of all together.
    alive_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0
    #: Jobs that were on a device which died; they ran again.
    rerun: int = 0

    @property
    def items(self) -> int:
        """Items that were computed."""
        return sum(lane.items for lane in self.lanes.values())

    @property
    def done(self) -> int:
        """Jobs that were done."""
        return sum(len(lane.latencies_s) for lane in self.lanes.values())

    @property
    def items_per_s(self) -> float:
        """Throughput."""
        return self.items / self.end_s if self.end_s else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the time in which devices worked."""
        return self.busy_s / self.alive_s if self.alive_s else 0.0

    @property
    def batch_items(self) -> float:
        """Mean size of a batch, in items."""
        return self.items / self.batches if self.batches else 0.0

    def by(
        self, group: Callable[[Lane], str], without: Collection[str] = ()
    ) -> dict[str, LaneOutcome]:
        """The lanes of a group added up, such as those of a class."""
        groups: dict[str, list[LaneOutcome]] = {}
        for lane, outcome in self.lanes.items():
            if lane.priority_class not in without:
                groups.setdefault(group(lane), []).append(outcome)
        return {name: added(each) for name, each in sorted(groups.items())}

    @property
    def is_contended(self) -> bool:
        """Whether jobs of all lanes waited long enough to say who got how much."""
        contended_s = sum(lane.contended_s for lane in self.lanes.values())
        return contended_s > MIN_CONTENDED_SHARE * self.busy_s

    def fairness(self, shares: Mapping[str, float]) -> float | None:
        """Jain's index of what the lanes got, divided by what they were entitled to.

        Only the time counts in which jobs of all lanes waited. None if there was hardly any.

        Args:
            shares: Of each class; the tenants of a class have equal parts of it.
        """
        tenants: dict[str, int] = {}
        for lane in self.lanes:
            tenants[lane.priority_class] = tenants.get(lane.priority_class, 0) + 1
        if not self.is_contended:
            return None
        got = [
            outcome.contended_s * tenants[lane.priority_class] / shares[lane.priority_class]
            for lane, outcome in self.lanes.items()
        ]
        return jain(got) if len(got) > 1 else None


def added(lanes: Iterable[LaneOutcome]) -> LaneOutcome:
    """Several as one."""
    total = LaneOutcome()
    for lane in lanes:
        total.latencies_s.extend(lane.latencies_s)
        total.first_s.extend(lane.first_s)
        total.items += lane.items
        total.device_s += lane.device_s
        total.contended_s += lane.contended_s
        total.late += lane.late
        total.with_deadline += lane.with_deadline
        total.shed += lane.shed
        total.left += lane.left
    return total


class Recorder:
    """Counts what happens."""

    def __init__(self, overhead_s: float = 0.0) -> None:
        """Has seen no job.

        Args:
            overhead_s: What is added to the latency of each job.
        """
        self.outcome = SimulatedRun()
        self._overhead_s = overhead_s
        self._waiting: dict[Lane, int] = {}
        #: Number of lanes without a waiting job.
        self._empty = 0
        #: Number of jobs that wait.
        self.waiting = 0

    @property
    def contended(self) -> bool:
        """Whether jobs of all lanes wait that have come so far."""
        return not self._empty and len(self._waiting) > 1

    def came(self, job: SimulatedJob) -> None:
        """Notes a job that came, or that waits again."""
        waiting = self._waiting.get(job.lane)
        if waiting is None:
            self.outcome.lanes[job.lane] = LaneOutcome()
            waiting = 0
        elif waiting == 0:
            self._empty -= 1
        self._waiting[job.lane] = waiting + 1
        self.waiting += 1

    def left(self, jobs: Iterable[SimulatedJob]) -> None:
        """Notes jobs that wait no longer."""
        waiting = self._waiting
        for job in jobs:
            self.waiting -= 1
            waiting[job.lane] -= 1
            if not waiting[job.lane]:
                self._empty += 1

    def shed(self, jobs: Sequence[SimulatedJob]) -> None:
        """Notes jobs that were given up."""
        self.left(jobs)
        for job in jobs:
            lane = self.outcome.lanes[job.lane]
            lane.shed += 1
            if job.payload.deadline_s is not None:
                lane.with_deadline += 1
                lane.late += 1

    def began(self, job: SimulatedJob, now_s: float) -> None:
        """Notes the first step of a job."""
        latency_s = now_s + self._overhead_s - job.arrived_s
        self.outcome.lanes[job.lane].first_s.append(latency_s)

    def done(self, sent: Sent, run_s: float, now_s: float) -> None:
        """Notes a batch that is back."""
        outcome = self.outcome
        outcome.batches += 1
        outcome.busy_s += run_s
        outcome.end_s = now_s
        lanes = outcome.lanes
        item_s = run_s / sent.batch.items
        told_s = now_s + self._overhead_s
        for job in sent.batch.jobs:
            lane = lanes[job.lane]
            latency_s = told_s - job.arrived_s
            lane.latencies_s.append(latency_s)
            lane.items += job.payload.items
            job_s = item_s * job.items
            lane.device_s += job_s
            if sent.contended:
                lane.contended_s += job_s
            deadline_s = job.payload.deadline_s
            if deadline_s is not None:
                lane.with_deadline += 1
                lane.late += latency_s > deadline_s

    def died(self, sent: Sequence[Sent], run_s: float) -> None:
        """Notes the batches of a device that died, of which the first one ran so long."""
        self.outcome.busy_s += run_s
        self.outcome.rerun += sum(len(each.batch.jobs) for each in sent)

    def close(self, alive_s: Callable[[float], float]) -> SimulatedRun:
        """The outcome, with the jobs that still wait.

        Args:
            alive_s: Says how long all devices together lived until a time.
        """
        self.outcome.alive_s = alive_s(self.outcome.end_s)
        for lane, waiting in self._waiting.items():
            self.outcome.lanes[lane].left = waiting
        return self.outcome


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
    first = _percentiles(lane.first_s, "first_p") if lane.first_s else {}
    return {**_percentiles(lane.latencies_s, "p"), **first}


def _percentiles(values: Iterable[float], name: str) -> Figures:
    ordered = sorted(values)
    found = {each: percentile(ordered, each / 100) for each in PERCENTILES}
    return {
        f"{name}{each}_ms": None if value is None else round(value * MS_PER_S, 2)
        for each, value in found.items()
    }


def _share(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def tables(policies: Sequence[Figures]) -> list[Table]:
    """Tables for people: of the policies, and of their classes and tenants if there are several."""
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
    # Who sees a text grow waits for its first token; a target for all of it says little.
    has_steps = any("first_p50_ms" in policies[0][group][name] for name in names)
    shown = [f"p{each}_ms" for each in PERCENTILES]
    if has_steps:
        shown = ["first_p50_ms", "first_p99_ms", "p50_ms", "p99_ms"]
    heads = ["policy", label, "jobs", *(name.replace("_", "\n") for name in shown)]
    heads += [] if has_steps else ["missed\ntarget", "given\nup"]
    table = _table(*heads, *(["share", "got"] if is_class else []), left=2)
    for policy in policies:
        for name in names:
            row = policy[group][name]
            table.add_row(
                policy["policy"] if name == names[0] else "",
                name or "(none)",
                f"{row['jobs']:,}",
                *(_ms(row.get(name)) for name in shown),
                *([] if has_steps else [_percent(row["missed"]), _percent(row["shed"])]),
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


def draw_plot(target: Path, policies: Sequence[Figures], ours: str, target_ms: float) -> None:
    """Draws how late each policy is; the same figures give the same bytes.

    Args:
        target: Path of the picture; its suffix chooses the format.
        policies: Of `report.figures`.
        ours: Name of the policy in another colour.
        target_ms: Wanted latency, for a line.

    Raises:
        StartError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise StartError("--plot needs matplotlib: pip install matplotlib") from None
    rows = list(reversed(policies))
    # Text stays text: smaller, and to be searched.
    with mpl.rc_context({"svg.hashsalt": "batchery", "svg.fonttype": "none"}):
        figure: Any = Figure(
            figsize=(9, ROW_INCHES * len(rows) + REST_INCHES), layout="constrained"
        )
        latency, missed = figure.subplots(1, 2, sharey=True)
        _draw_latency(latency, rows, ours, target_ms)
        _draw_missed(missed, rows, ours)
        metadata = {"Date": None} if target.suffix == ".svg" else {}
        try:
            figure.savefig(target, metadata=metadata)
        except (OSError, ValueError) as error:
            raise StartError(f"{target}: cannot be drawn: {error}") from None


def _draw_latency(axes: Any, rows: Sequence[Figures], ours: str, target_ms: float) -> None:
    """A line for each policy, from the median to the last percentile."""
    for place, row in enumerate(rows):
        known = [row[f"p{each}_ms"] for each in PERCENTILES if row[f"p{each}_ms"] is not None]
        axes.plot(known, [place] * len(known), "o-", color=_colour(row, ours), linewidth=2)
    axes.axvline(target_ms, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["policy"] for row in rows])
    axes.set_xscale("log")
    named = ", ".join(f"p{each}" for each in PERCENTILES)
    axes.set_xlabel(f"latency in ms: {named}; target dashed")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_missed(axes: Any, rows: Sequence[Figures], ours: str) -> None:
    shares = [100 * (row["missed"] or 0.0) for row in rows]
    bars = axes.barh(range(len(rows)), shares, color=[_colour(row, ours) for row in rows])
    axes.bar_label(bars, [f"{each:.1f} %" for each in shares], padding=4)
    axes.set_xlim(0, max(1.0, *shares) * 1.2)
    axes.set_xlabel("jobs that missed the target, %")
    axes.spines[["top", "right"]].set_visible(False)


def _colour(row: Figures, ours: str) -> str:
    return OURS if row["policy"] == ours else OTHERS
