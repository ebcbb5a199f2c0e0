"""`batchery simulate`: how the scheduler would do with such jobs and devices, beside others."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from batchery.cli.app import FiniteRange
from batchery.cli.console import write_errors
from batchery.errors import StartError
from batchery.settings import Settings
from batchery_worker.job import Limits
from batchery_worker.simulator.engine import MAX_DEVICES, Fleet, ServiceTime, Simulation
from batchery_worker.simulator.outcome import (
    Figures,
    SimulatedRun,
    draw_plot,
    figures,
    tables,
)
from batchery_worker.simulator.policies import FixedBatcher, Policy, RealScheduler, SlotScheduler
from batchery_worker.simulator.slots import SlotSimulation
from batchery_worker.simulator.workload import (
    DEFAULT_SHARES,
    MS_PER_S,
    PATIENT,
    WORKLOADS,
    Amount,
    Arrival,
    Demand,
    read_trace,
)

#: Names of the policies that are the worker's own scheduler: as it is by default, with
#: `target_latency_ms`, and with that, deadlines and `shed_late`.
OURS, TARGET, SHEDDING, FIXED = "ours", "target", "shedding", "fixed"

#: Jobs of a run that says neither how many nor how long.
USUAL_JOBS = 20_000

#: Load of a run that names neither load nor rate.
USUAL_LOAD = 0.8

#: All policies, as an option says it.
ALL = "all"

#: Maximum number of jobs: so many take half an hour for each policy, and gigabytes.
MAX_JOBS = 50_000_000

#: Width of the tables where nobody sees how wide the terminal is, in characters.
WIDTH = 80

HELP = """Try the scheduler on jobs and devices that need not exist, beside other policies.

Runs the worker's scheduler in virtual time, at about a million jobs in half a minute. All policies
get the same jobs. Needs neither Redis nor a worker nor a GPU. A batch takes --pass-ms, and
--item-ms for each item; --cost says it for one task of a trace. `batchery stats --record` writes
traces of live jobs. Their classes are those of the settings, as a worker in this folder has them.

\b
Workloads:
  poisson   jobs that know nothing of each other
  bursty    bursts of half a second on average, at 2.5 times the mean rate
  day       a day in the time of the run: half more than the mean at noon
  bulk      half of the jobs, beside a bulk that keeps all devices busy
  tenants   one tenant sends half of all jobs, in bursts; nine share the rest

\b
Policies:
  ours      the worker's scheduler
  target    the same with --target-ms as target_latency_ms
  shedding  the same, which also gives up what would be late
  fixed     a batch leaves when it is full or its oldest job waited --timeout-ms

With --slots jobs join a batch that is running, as generated texts do:

\b
  ours        the worker's scheduler; every job stays until it has ended
  preempting  the same, but a job of a higher class takes the slot of a lower one
  static      a batch of that many jobs is answered when its longest has ended

\b
Exit codes:
  0    simulated
  2    an option or the trace is wrong
  130  interrupted
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a comparison needs to know; times in seconds."""

    #: Share of each class, highest class first.
    shares: Mapping[str, float]
    #: Name of one of `WORKLOADS`.
    workload: str
    #: Recorded jobs instead, in the order of time.
    trace: Sequence[Arrival] | None
    #: Jobs per second, without a bulk; None where `load` says it.
    rate_per_s: float | None
    #: The same, as a share of what the devices can do in full batches.
    load: float
    fleet: Fleet
    max_batch_size: int
    #: Whether jobs join and leave between steps; then a batch is what sits in the slots.
    has_slots: bool
    max_wait_s: float
    #: Of the policies that wait for a fixed time.
    timeout_s: float
    target_s: float
    #: After its arrival; None for none.
    deadline_s: float | None
    items: Amount
    #: When to stop: after so many jobs, or so many seconds.
    jobs: int | None
    seconds: float | None
    seed: int

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


#: Name -> makes the policy, fresh.
POLICIES: dict[str, Callable[[Plan], Policy]] = {
    OURS: lambda plan: RealScheduler(plan.shares),
    TARGET: lambda plan: RealScheduler(plan.shares),
    SHEDDING: lambda plan: RealScheduler(plan.shares, sheds_late=True),
    FIXED: lambda plan: FixedBatcher(plan.max_batch_size, plan.timeout_s),
}

#: The same for devices with slots.
SLOT_POLICIES: dict[str, Callable[[Plan], SlotSimulation]] = {
    OURS: lambda plan: SlotSimulation(SlotScheduler(plan.shares), plan.fleet, plan.max_batch_size),
    "preempting": lambda plan: SlotSimulation(
        SlotScheduler(plan.shares), plan.fleet, plan.max_batch_size, preempting=[*plan.shares]
    ),
    "static": lambda plan: SlotSimulation(
        FixedBatcher(plan.max_batch_size, plan.timeout_s),
        plan.fleet,
        plan.max_batch_size,
        is_static=True,
    ),
}


def compared(plan: Plan, names: Sequence[str]) -> list[Figures]:
    """Runs policies on the same jobs.

    Returns:
        The figures of each; see `outcome.figures`.

    Raises:
        StartError: There are no jobs.
    """
    found = []
    for name in names:
        if plan.has_slots:
            outcome = SLOT_POLICIES[name](plan).run(plan.arrivals())
        else:
            outcome = _run_batches(plan, name)
        if not outcome.lanes:
            raise StartError("there are no jobs; give more seconds, or a trace that has some")
        found.append(figures(name, outcome, plan.shares, plan.target_s, plan.patient))
    return found


def _run_batches(plan: Plan, name: str) -> SimulatedRun:
    target_s = plan.target_s if name in (TARGET, SHEDDING) else None
    limits = Limits(plan.max_batch_size, plan.max_wait_s, target_s)
    simulation = Simulation(POLICIES[name](plan), plan.fleet, limits, plan.seed)
    arrivals = plan.arrivals()
    if name == SHEDDING:
        arrivals = map(plan.with_deadline, arrivals)
    return simulation.run(arrivals)


#: Numbers that an option may have. The bounds keep sums and ratios of them finite: in ms a billion
#: is eleven days.
MAX_NUMBER = 10**9
NOT_NEGATIVE = FiniteRange(0, MAX_NUMBER)
POSITIVE = FiniteRange(1 / MAX_NUMBER, MAX_NUMBER)
FACTOR = FiniteRange(0.001, 1000)


class AtDevice(click.ParamType[tuple[int, float]]):
    """A device and a number: `3@12.5`."""

    name = "at"

    def __init__(self, numbers: FiniteRange) -> None:
        self._numbers = numbers

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Number of the device, from 0, and what is behind the @."""
        if isinstance(value, tuple):
            return value
        device, at, number = value.partition("@")
        if not at or not device.isdecimal():
            self.fail(f"{value!r}: expected a device and a number, such as 0@2.5.", param, ctx)
        return int(device), self._numbers.convert(number, param, ctx)


def _policies(value: str | None, *, has_slots: bool) -> Sequence[str]:
    """The names of an option, which are separated by commas."""
    known = [*SLOT_POLICIES] if has_slots else [*POLICIES]
    if value is None:
        return [*SLOT_POLICIES] if has_slots else [OURS, FIXED]
    names = known if value == ALL else list(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"no policy {name!r}; there are {', '.join(known)}, or {ALL}",
                param_hint="--policies",
            )
    return names


def _number(
    name: str, default: float, text: str, numbers: FiniteRange = NOT_NEGATIVE
) -> Callable[[Callable[..., Any]], Any]:
    """An option that has a number."""
    return click.option(name, type=numbers, default=default, help=text)


@click.command(help=HELP)
@click.option(
    "--workload", type=click.Choice([*WORKLOADS]), help="Which jobs come.  [default: poisson]"
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Recorded jobs instead: a JSON object per line, with time_s and perhaps task, class,"
    " tenant, items, tokens and deadline_s; in any order.",
)
@click.option(
    "--load",
    type=FACTOR,
    help=f"Of what the devices can do in full batches.  [default: {USUAL_LOAD}]",
)
@click.option("--rate", type=POSITIVE, help="Jobs per second, instead of --load.")
@click.option(
    "--jobs", type=click.IntRange(1, MAX_JOBS), help=f"How many come.  [default: {USUAL_JOBS}]"
)
@click.option("--seconds", type=POSITIVE, help="For how long jobs come, in virtual time.")
@_number("--items", 1.0, "Mean number of a job.", FiniteRange(1, 10**6))
@_number("--spread", 0.0, "Of the items of a job: sigma of a log-normal law.", FiniteRange(0, 5))
@click.option("--devices", type=click.IntRange(1, MAX_DEVICES), default=4)
@_number("--pass-ms", 10.0, "Of a pass.")
@_number("--item-ms", 0.5, "Of each item.")
@click.option(
    "--cost",
    type=(str, NOT_NEGATIVE, NOT_NEGATIVE),
    multiple=True,
    metavar="TASK PASS_MS ITEM_MS",
    help="The same for one task of the trace; several times for several tasks.",
)
@_number("--token-ms", 0.0, "Of each token, where a trace has tokens.")
@_number("--prepare-ms", 0.0, "From sending a batch until it can run, beside the batch before.")
@_number("--overhead-ms", 0.0, "Of each job: the way to the worker, which keeps no device busy.")
@_number("--noise", 0.0, "Of the time of a batch: sigma of a log-normal law.", FiniteRange(0, 5))
@click.option("--max-batch-size", type=click.IntRange(1, 10**6), default=64)
@click.option(
    "--micro-batch-size", type=click.IntRange(1), help="Items of a pass; by default a whole batch."
)
@click.option(
    "--slots",
    type=click.IntRange(1, 10**6),
    help="Jobs join and leave between steps, so many at once on a device; each item is a step, such"
    " as a token that is generated. Instead of --max-batch-size.",
)
@_number("--max-wait-ms", 0.0, "How long ours waits for a batch to fill, as in the settings.")
@_number("--timeout-ms", 10.0, "How long fixed waits for it.")
@_number("--target-ms", 100.0, "Wanted latency of a job; target and shedding follow it.", POSITIVE)
@click.option("--deadline-ms", type=POSITIVE, help="Time after which nobody wants a result.")
@click.option(
    "--kill",
    type=AtDevice(NOT_NEGATIVE),
    multiple=True,
    metavar="DEVICE@S",
    help="Devices, from 0, that die after so many seconds.",
)
@click.option(
    "--slow",
    type=AtDevice(FACTOR),
    multiple=True,
    metavar="DEVICE@FACTOR",
    help="Devices that take so many times as long.",
)
@click.option(
    "--policies",
    help=f"Separated by commas, or {ALL}.  [default: {OURS},{FIXED}; with --slots {ALL}]",
)
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Where to write the figures; - instead of the tables.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it; needs matplotlib.")
def simulate(
    *, policies: str | None, json_path: Path | None, plot: Path | None, **options: Any
) -> None:
    """Runs the command; see `HELP`."""
    names = _policies(policies, has_slots=options["slots"] is not None)
    plan = _plan(options)
    _check_costs(plan, options["cost"])
    found = compared(plan, names)
    report = {**_head(plan, options), "policies": found}
    if json_path is not None:
        _write(report, json_path)
    if json_path is None or str(json_path) != "-":
        _print(report, plan)
    if plot is not None:
        draw_plot(plot, found, OURS, plan.target_s * MS_PER_S)


def _plan(options: Mapping[str, Any]) -> Plan:
    """What the options say together."""
    if options["trace"]:
        for name in ("workload", "load", "rate", "deadline_ms"):
            if options[name] is not None:
                option = name.replace("_", "-")
                raise click.UsageError(f"--trace has its own jobs; leave out --{option}")
    if options["load"] is not None and options["rate"] is not None:
        raise click.UsageError("--load and --rate say the same; give one of them")
    if not options["pass_ms"] + options["item_ms"]:
        raise click.UsageError("--pass-ms and --item-ms are both 0; a batch takes some time")
    _check_slots(options)
    shares, trace = _jobs(options["trace"])
    if options["token_ms"] and not any(job.tokens for job in trace or ()):
        raise click.UsageError("--token-ms is of the tokens of a trace, and no job here has any")
    found = Plan(
        shares=shares,
        workload=options["workload"] or "poisson",
        trace=trace,
        rate_per_s=options["rate"],
        load=options["load"] or USUAL_LOAD,
        fleet=_fleet(options),
        max_batch_size=options["slots"] or options["max_batch_size"],
        has_slots=options["slots"] is not None,
        max_wait_s=options["max_wait_ms"] / MS_PER_S,
        timeout_s=options["timeout_ms"] / MS_PER_S,
        target_s=options["target_ms"] / MS_PER_S,
        deadline_s=options["deadline_ms"] and options["deadline_ms"] / MS_PER_S,
        items=Amount(options["items"], options["spread"]),
        jobs=options["jobs"],
        seconds=options["seconds"],
        seed=options["seed"],
    )
    if trace is None and not found.jobs and found.jobs_per_s * (found.seconds or 0) > MAX_JOBS:
        raise click.UsageError(
            f"that is more than {MAX_JOBS:,} jobs; give --jobs or less --seconds"
        )
    return found


def _check_slots(options: Mapping[str, Any]) -> None:
    """Refuses what means nothing where jobs join and leave between steps."""
    for name in ("kill", "cost", "micro_batch_size", "deadline_ms", "prepare_ms", "noise"):
        if options["slots"] is not None and options[name]:
            raise click.UsageError(f"--slots goes without --{name.replace('_', '-')}")


def _fleet(options: Mapping[str, Any]) -> Fleet:
    count = options["devices"]
    for name in ("kill", "slow"):
        for device, _ in options[name]:
            if device >= count:
                raise click.UsageError(f"--{name} {device}: the last device is {count - 1}")
    # Its fields are called like the options.
    service = ServiceTime(**{each.name: options[each.name] for each in fields(ServiceTime)})
    tasks = {
        task: replace(service, pass_ms=pass_ms, item_ms=item_ms)
        for task, pass_ms, item_ms in options["cost"]
    }
    return Fleet(count, service, dict(options["slow"]), dict(options["kill"]), tasks)


def _jobs(trace: Path | None) -> tuple[Mapping[str, float], Sequence[Arrival] | None]:
    """The shares of the classes, and the jobs of a trace."""
    if trace is None:
        return DEFAULT_SHARES, None
    shares = Settings.load().shares
    return shares, read_trace(trace, shares)


def _check_costs(plan: Plan, costs: Sequence[tuple[str, float, float]]) -> None:
    """Refuses the cost of a task that has no job, and one that is nothing or not the only one."""
    if costs and plan.trace is None:
        raise click.UsageError("--cost is of a task of a trace; use --pass-ms and --item-ms")
    tasks = {job.task for job in plan.trace or ()}
    for task, pass_ms, item_ms in costs:
        if task not in tasks:
            known = ", ".join(sorted(tasks)) or "none"
            raise click.UsageError(f"--cost {task}: no such task in the trace; there are {known}")
        if not pass_ms + item_ms:
            raise click.UsageError(f"--cost {task}: both are 0; a batch takes some time")
    if len({task for task, *_ in costs}) < len(costs):
        raise click.UsageError("--cost names a task twice; give each once")


def _head(plan: Plan, options: Mapping[str, Any]) -> Figures:
    """What the figures are of; the rest of JSON."""
    is_trace = plan.trace is not None
    head = {
        "workload": None if is_trace else plan.workload,
        "jobs_per_s": None if is_trace else round(plan.jobs_per_s, 3),
        "capacity_items_per_s": round(plan.capacity_per_s, 3),
        "patient": sorted(plan.patient),
        "shares": dict(plan.shares),
    }
    given = {name: value for name, value in options.items() if name not in head}
    return {**head, **given, "trace": options["trace"] and str(options["trace"])}


def _write(report: Figures, path: Path) -> None:
    text = json.dumps(report)
    if str(path) == "-":
        click.echo(text)
        return
    with write_errors(path):
        path.write_text(f"{text}\n", encoding="utf-8")


def _print(report: Figures, plan: Plan) -> None:
    # Names come from traces, and so from callers.
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    devices = f"{plan.fleet.count} device{'s' if plan.fleet.count > 1 else ''}"
    can = f"{devices} that can do {plan.capacity_per_s:,.0f} items/s in full batches"
    if plan.trace is not None:
        console.print(f"{report['trace']} on {can}", soft_wrap=True)
    else:
        console.print(f"{plan.workload}, {plan.jobs_per_s:,.0f} jobs/s on {can}", soft_wrap=True)
    console.print(f"The target is {plan.target_s * MS_PER_S:g} ms.", end="")
    if plan.patient:
        others = ", ".join(sorted(plan.patient))
        console.print(f" Jobs of the class {others} have none, and count only below.", end="")
    console.print()
    for table in tables(report["policies"]):
        console.print(table)
    if left := sum(row["left"] for row in report["policies"]):
        console.print(f"{left:,} jobs were never done: no device was left.")
