"""What became of the jobs: counted while the simulation runs, by lane. Pure."""

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from batchery_worker.job import Lane
from batchery_worker.simulator.devices import Sent
from batchery_worker.simulator.policy import SimulatedJob

#: Share of the work in which jobs of all lanes must have waited: of less, shares say nothing.
MIN_CONTENDED_SHARE = 0.02


@dataclass(slots=True)
class LaneOutcome:
    """What became of the jobs of one lane, or of several together."""

    #: From arrival to result, of each job that was done, in seconds.
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
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
        """The lanes of a group added up, such as those of a class.

        Args:
            group: Says of which group a lane is.
            without: Classes to be left out.
        """
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
            lane.items += job.items
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
