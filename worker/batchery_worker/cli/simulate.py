"""`batchery simulate`: how the scheduler would do with such jobs and devices, beside others."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from batchery.cli.console import write_errors
from batchery.settings import Settings
from batchery_worker.simulator.comparison import (
    OURS,
    POLICIES,
    USUAL_JOBS,
    USUAL_LOAD,
    Plan,
    compared,
)
from batchery_worker.simulator.devices import MAX_DEVICES, MS_PER_S, Fleet, ServiceTime
from batchery_worker.simulator.plot import draw_plot
from batchery_worker.simulator.recorded import read_trace
from batchery_worker.simulator.report import Figures, tables
from batchery_worker.simulator.workload import DEFAULT_SHARES, WORKLOADS, Amount, Arrival

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

\b
Exit codes:
  0    simulated
  2    an option or the trace is wrong
  130  interrupted
"""


class FiniteRange(click.FloatRange):
    """A range that has neither infinity nor what is not a number."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number that has an end.", param, ctx)
        return number


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
        """Numbers of this range."""
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


def _policies(_: click.Context, __: click.Parameter, value: str) -> Sequence[str]:
    """The names of an option, which are separated by commas."""
    names = [*POLICIES] if value == ALL else list(dict.fromkeys(value.split(",")))
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise click.BadParameter(f"no policy {name!r}; there are {known}, or {ALL}")
    return names


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
@click.option(
    "--items",
    type=FiniteRange(1, 10**6),
    default=1.0,
    show_default=True,
    help="Mean number of a job.",
)
@click.option(
    "--spread",
    type=FiniteRange(0, 5),
    default=0.0,
    show_default=True,
    help="Of the items of a job: sigma of a log-normal law.",
)
@click.option("--devices", type=click.IntRange(1, MAX_DEVICES), default=4, show_default=True)
@click.option("--pass-ms", type=NOT_NEGATIVE, default=10.0, show_default=True, help="Of a pass.")
@click.option("--item-ms", type=NOT_NEGATIVE, default=0.5, show_default=True, help="Of each item.")
@click.option(
    "--cost",
    type=(str, NOT_NEGATIVE, NOT_NEGATIVE),
    multiple=True,
    metavar="TASK PASS_MS ITEM_MS",
    help="The same for one task of the trace; several times for several tasks.",
)
@click.option(
    "--token-ms",
    type=NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="Of each token, where a trace has tokens.",
)
@click.option(
    "--prepare-ms",
    type=NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="From sending a batch until it can run, beside the batch before.",
)
@click.option(
    "--overhead-ms",
    type=NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="Of each job: the way to the worker, which keeps no device busy.",
)
@click.option(
    "--noise",
    type=FiniteRange(0, 5),
    default=0.0,
    show_default=True,
    help="Of the time of a batch: sigma of a log-normal law.",
)
@click.option("--max-batch-size", type=click.IntRange(1, 10**6), default=64, show_default=True)
@click.option(
    "--micro-batch-size", type=click.IntRange(1), help="Items of a pass; by default a whole batch."
)
@click.option(
    "--max-wait-ms",
    type=NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="How long ours waits for a batch to fill, as in the settings.",
)
@click.option(
    "--timeout-ms",
    type=NOT_NEGATIVE,
    default=10.0,
    show_default=True,
    help="How long fixed waits for it.",
)
@click.option(
    "--target-ms",
    type=POSITIVE,
    default=100.0,
    show_default=True,
    help="Wanted latency of a job; target and shedding follow it.",
)
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
    default=f"{OURS},fixed",
    show_default=True,
    callback=_policies,
    help=f"Separated by commas, or {ALL}.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Where to write the figures; - instead of the tables.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it; needs matplotlib.")
def simulate(
    *, policies: Sequence[str], json_path: Path | None, plot: Path | None, **options: Any
) -> None:
    """Runs the command; see `HELP`."""
    plan = _plan(options)
    _check_costs(plan, options["cost"])
    found = compared(plan, policies)
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
        max_batch_size=options["max_batch_size"],
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


def _fleet(options: Mapping[str, Any]) -> Fleet:
    count = options["devices"]
    for name in ("kill", "slow"):
        for device, _ in options[name]:
            if device >= count:
                raise click.UsageError(f"--{name} {device}: the last device is {count - 1}")
    service = ServiceTime(
        pass_ms=options["pass_ms"],
        item_ms=options["item_ms"],
        token_ms=options["token_ms"],
        prepare_ms=options["prepare_ms"],
        overhead_ms=options["overhead_ms"],
        micro_batch_size=options["micro_batch_size"],
        noise=options["noise"],
    )
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
    console = Console(highlight=False)
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
