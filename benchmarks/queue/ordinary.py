"""Whether ordinary tasks are slower by `install(app)`: pools and concurrencies, with and without.

Each row runs on Celery as it is and on an app that has installed Batchery and has a device beside
its pool; both in each round, so that whatever the machine does meets both.

    python -m benchmarks.queue.ordinary --rounds 5 --json benchmarks/results/ordinary.json
"""

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Sample, run_in_turn
from benchmarks.queue.systems import CELERY, WORKER, System

MODULE = "benchmarks.peers.ordinary_tasks"
POOLS = ("prefork", "threads", "solo", "gevent")
CONCURRENCIES = (1, 2, 8)

#: Kind of task -> jobs per round, as a multiple of what was asked for.
KINDS = {"noop": 1.0, "nap": 0.5, "burn": 0.5}


def system(kind: str, pool: str, concurrency: int, *, installed: bool) -> System:
    """One kind of task on one pool."""
    return System(
        f"{kind}, {pool} -c {concurrency}, {'installed' if installed else 'stock'}",
        MODULE,
        (*CELERY, MODULE, *WORKER, "-P", pool, "-c", str(concurrency)),
        environment={"PEER_TASK": kind, "PEER_INSTALL": str(int(installed))},
        weight=KINDS[kind],
        has_latency=False,
    )


def main() -> None:
    """Runs all rows in turn; prints stock beside installed, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000, help="per row and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=POOLS[:2])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    cases = list(itertools.product(options.kinds, options.pools, CONCURRENCIES))
    systems = [system(*case, installed=installed) for case in cases for installed in (False, True)]
    samples = run_in_turn(systems, options.jobs, 0, options.rounds)
    rows = [row(samples, *case) for case in cases]
    info = {"hardware": hardware(), "jobs": options.jobs, "rounds": options.rounds, "rows": rows}
    show(info)
    write_report(options.json, info)


def row(samples: dict[str, list[Sample]], kind: str, pool: str, concurrency: int) -> dict[str, Any]:
    """Medians of both, and the median of the rounds' own ratios."""
    stock, installed = (
        [each.jobs_per_s for each in samples[system(kind, pool, concurrency, installed=yes).name]]
        for yes in (False, True)
    )
    ratios = [ours / theirs for ours, theirs in zip(installed, stock, strict=True)]
    return {
        "task": kind,
        "pool": pool,
        "concurrency": concurrency,
        "stock_jobs_per_s": round(statistics.median(stock), 1),
        "installed_jobs_per_s": round(statistics.median(installed), 1),
        "ratio": round(statistics.median(ratios), 3),
    }


def show(info: dict[str, Any]) -> None:
    """Prints the table, ready for a page of docs."""
    made = Table("task", "pool", "stock, jobs/s", "installed, jobs/s", "ratio", box=box.MARKDOWN)
    for each in info["rows"]:
        pool = f"{each['pool']} -c {each['concurrency']}"
        rates = (f"{each[f'{name}_jobs_per_s']:,}" for name in ("stock", "installed"))
        made.add_row(each["task"], pool, *rates, f"{each['ratio']:.2f}")
    console = Console(highlight=False, width=100)
    console.print(info["hardware"])
    console.print(made)


if __name__ == "__main__":
    main()
