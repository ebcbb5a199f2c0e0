"""The worker's scheduler beside the published rules of others, in virtual time.

Four devices take 10 ms for a batch, 0.5 ms for each item and 2 ms to prepare a batch. All policies
get the same jobs: 80 % of what the devices can do in full batches. The figure is the share of jobs
that miss a target of 100 ms; those that were given up have missed it, too.

    python -m benchmarks.scheduling --workloads day bulk --policies ours fixed
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from batchery.settings import Settings
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Limits
from benchmarks.hardware import hardware, write_report
from benchmarks.rows import print_table
from benchmarks.scheduling.rivals import Bento, Clipper, Priority, Rival
from benchmarks.scheduling.virtual import Arrival, Fleet, Policy, Run, Simulation
from benchmarks.scheduling.workloads import BULK, WORKLOADS, Demand, make_jobs

FLEET = Fleet()
BATCH_SIZE = 64
LOAD = 0.8

#: Wanted latency, and how long those wait that wait for a fixed time, in seconds.
TARGET_S, TIMEOUT_S = 0.1, 0.01

#: The classes of a worker by default.
SHARES = {name: each.share for name, each in Settings.model_fields["classes"].default.items()}

TARGET, SHEDDING = "target", "shedding"

#: Name -> makes the policy, fresh. `target` and `shedding` are ours with those settings.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "ours": lambda: Scheduler(SHARES),
    TARGET: lambda: Scheduler(SHARES),
    SHEDDING: lambda: Scheduler(SHARES, sheds_late=True),
    "fixed": lambda: Rival(BATCH_SIZE, TIMEOUT_S),
    "clipper": lambda: Clipper(BATCH_SIZE, TARGET_S),
    "bento": lambda: Bento(BATCH_SIZE, TARGET_S, FLEET.count),
    "priority": lambda: Priority(BATCH_SIZE, TIMEOUT_S, [*SHARES]),
}


def simulate(name: str, jobs: Sequence[Arrival]) -> Run:
    """Lets a policy run jobs."""
    limits = Limits(BATCH_SIZE, target_s=TARGET_S if name in (TARGET, SHEDDING) else None)
    if name == SHEDDING:
        jobs = [job if job.lane == BULK else job._replace(deadline_s=TARGET_S) for job in jobs]
    return Simulation(POLICIES[name](), FLEET, limits).run(jobs)


def describe(run: Run) -> dict[str, float]:
    """Figures of a run; its live jobs alone have a target."""
    live = sorted(latency_s for job, latency_s in run.done if job.lane != BULK)
    given_up = sum(job.lane != BULK for job in run.given_up)
    late = sum(latency_s > TARGET_S for latency_s in live) + given_up
    return {
        "missed": late / (len(live) + given_up),
        "p50_ms": live[len(live) // 2] * 1e3,
        "p99_ms": live[len(live) * 99 // 100] * 1e3,
        "items_per_s": sum(job.items for job, _ in run.done) / run.end_s,
    }


def main() -> None:
    """Simulates, prints, writes."""
    options = parse()
    capacity_per_s = FLEET.capacity_per_s(BATCH_SIZE)
    rate_per_s = LOAD * capacity_per_s
    table: list[list[str]] = []
    rows: list[dict[str, Any]] = []
    for workload in options.workloads:
        table.append([workload])
        for policy in options.policies:
            runs = []
            for seed in range(1, options.seeds + 1):
                demand = Demand(rate_per_s, options.jobs / rate_per_s, capacity_per_s, seed)
                runs.append(describe(simulate(policy, make_jobs(workload, demand))))
            means = {key: round(fmean(run[key] for run in runs), 4) for key in runs[0]}
            rows.append({"workload": workload, "policy": policy, **means})
            table[-1].append(f"{100 * means['missed']:.1f}")
    print_table(["workload", *options.policies], table)
    report = {"hardware": hardware(), "jobs": options.jobs, "seeds": options.seeds, "rows": rows}
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES], default=[*POLICIES])
    parser.add_argument("--jobs", type=int, default=20_000, help="of a run, about")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with other jobs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
