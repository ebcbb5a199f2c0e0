"""Several policies on the same jobs and devices. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

from batchery.errors import StartError
from batchery_worker.job import Limits
from batchery_worker.simulator.devices import Fleet
from batchery_worker.simulator.engine import Simulation
from batchery_worker.simulator.policy import Policy, RealScheduler
from batchery_worker.simulator.report import Figures, figures
from batchery_worker.simulator.rivals import FixedRival, RivalByTask
from batchery_worker.simulator.workload import PATIENT, WORKLOADS, Amount, Arrival, Demand

#: Names of the policies that are the worker's own scheduler: as it is by default, with
#: `target_latency_ms`, and with that, deadlines and `shed_late`.
OURS, TARGET, SHEDDING = "ours", "target", "shedding"

#: Jobs of a run that says neither how many nor how long.
USUAL_JOBS = 20_000

#: Load of a run that names neither load nor rate.
USUAL_LOAD = 0.8


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a comparison needs to know; times in seconds."""

    #: Share of each class, highest class first.
    shares: Mapping[str, float]
    #: Name of one of `WORKLOADS`.
    workload: str = "poisson"
    #: Recorded jobs instead, in the order of time.
    trace: Sequence[Arrival] | None = None
    #: Jobs per second, without a bulk; None where `load` says it.
    rate_per_s: float | None = None
    #: The same, as a share of what the devices can do in full batches.
    load: float = USUAL_LOAD
    fleet: Fleet = field(default_factory=lambda: Fleet(4))
    max_batch_size: int = 64
    max_wait_s: float = 0.0
    #: Of the policies that wait for a fixed time.
    timeout_s: float = 0.01
    target_s: float = 0.1
    #: After its arrival; None for none.
    deadline_s: float | None = None
    items: Amount = field(default_factory=Amount)
    #: When to stop: after so many jobs, or so many seconds.
    jobs: int | None = None
    seconds: float | None = None
    seed: int = 0

    @property
    def capacity_per_s(self) -> float:
        """Items per second that the devices compute in full batches, of all tasks as they come."""
        items: Counter[str] = Counter()
        tokens = 0
        for job in self.trace or ():
            items[job.task] += job.items
            tokens += job.tokens
        mean_tokens = tokens / items.total() if items else 0.0
        return self.fleet.capacity_per_s(self.max_batch_size, mean_tokens, items)

    @property
    def jobs_per_s(self) -> float:
        """The mean rate of a workload, without its bulk."""
        return self.rate_per_s or self.load * self.capacity_per_s / self.items.mean

    @property
    def patient(self) -> frozenset[str]:
        """Classes that have no target."""
        return frozenset() if self.trace is not None else PATIENT.get(self.workload, frozenset())

    def arrivals(self) -> Iterator[Arrival]:
        """The jobs, which are the same each time."""
        jobs, seconds = self.jobs, self.seconds
        if self.trace is not None:
            stream = iter(self.trace)
        else:
            stream = WORKLOADS[self.workload](self._demand())
            jobs = USUAL_JOBS if jobs is None and seconds is None else jobs
        if seconds is not None:
            stream = takewhile(lambda each: each.time_s < seconds, stream)
        return islice(stream, jobs)

    def with_deadline(self, arrival: Arrival) -> Arrival:
        """The same job; its deadline is the target, if it has one and no deadline."""
        if arrival.deadline_s is not None or arrival.lane.priority_class in self.patient:
            return arrival
        return arrival._replace(deadline_s=self.target_s)

    def _demand(self) -> Demand:
        return Demand(
            rate_per_s=self.jobs_per_s,
            capacity_per_s=self.capacity_per_s,
            seconds=self.seconds or (self.jobs or USUAL_JOBS) / self.jobs_per_s,
            devices=self.fleet.count,
            max_batch_size=self.max_batch_size,
            items=self.items,
            deadline_s=self.deadline_s,
            seed=self.seed,
        )


#: Name -> makes the policy, fresh. A rival has a queue for each task, as each has its own costs.
POLICIES: dict[str, Callable[[Plan], Policy]] = {
    OURS: lambda plan: RealScheduler(plan.shares),
    TARGET: lambda plan: RealScheduler(plan.shares),
    SHEDDING: lambda plan: RealScheduler(plan.shares, sheds_late=True),
    "fixed": lambda plan: RivalByTask(partial(FixedRival, plan.max_batch_size, plan.timeout_s)),
}


def compared(plan: Plan, names: Sequence[str]) -> list[Figures]:
    """Runs policies on the same jobs.

    Args:
        plan: What comes, and to which devices.
        names: Of the policies.

    Returns:
        The figures of each; see `report.figures`.

    Raises:
        StartError: There are no jobs.
    """
    found = []
    for name in names:
        target_s = plan.target_s if name in (TARGET, SHEDDING) else None
        limits = Limits(plan.max_batch_size, plan.max_wait_s, target_s)
        simulation = Simulation(POLICIES[name](plan), plan.fleet, limits, plan.seed)
        arrivals = plan.arrivals()
        if name == SHEDDING:
            arrivals = map(plan.with_deadline, arrivals)
        outcome = simulation.run(arrivals)
        if not outcome.lanes:
            raise StartError("there are no jobs; give more seconds, or a trace that has some")
        found.append(figures(name, outcome, plan.shares, plan.target_s, plan.patient))
    return found
