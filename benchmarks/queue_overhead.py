"""What the queue costs: no-op jobs through Batchery, through Celery's own pools, and elsewhere.

Every system runs the same jobs in the same run, in turn, on a private redis-server: all published
before the worker starts, results stored, acknowledged late, one worker, no logging, no task events
unless the row says so. The clock runs from a tenth of the results to the last, so that neither the
worker's start nor the publishing counts.

    python benchmarks/queue_overhead.py --rounds 5 --json queue.json --plot queue.svg

Other systems are installed by pip when they are first needed, each into an environment of its own.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from batchery.embedded import EmbeddedRedis
from hardware import hardware
from queue_runs import Bench, Sample
from queue_systems import TRANSPORTS, System, default_transport, systems
from venvs import python_of

#: Columns of the table, also where the output is no terminal.
WIDTH = 130

HEADS = ("", "jobs/s", "spread", "of stock's best", "worker CPU", "Redis CPU", "call p50", "p99")

PLOT = ("matplotlib==3.11.2",)


def main() -> None:
    """Runs all systems in turn, prints a table; writes JSON and a plot if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    chosen = choose(systems(options.transport), options.systems)
    for system in chosen:
        python_of(system.venv, system.requirements)
    samples: dict[str, list[Sample]] = {system.name: [] for system in chosen}
    with EmbeddedRedis() as server:
        bench = Bench(server, options.jobs, options.calls)
        for number in range(options.rounds):
            # To and fro, so that a machine that slows down slows all of them.
            for system in chosen if number % 2 == 0 else reversed(chosen):
                console.print(f"round {number + 1} of {options.rounds}: {system.name}")
                samples[system.name].append(bench.run(system))
    report = {
        "hardware": hardware(),
        "transport": options.transport,
        "jobs": options.jobs,
        "rounds": options.rounds,
        "rows": [row(name, each) for name, each in samples.items()],
    }
    console.print(report["hardware"])
    print_table(console, report["rows"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4000, help="per round; fast systems get more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=200, help="single calls per round, or 0")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default=default_transport(), help="of our own rows"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows into this file, an SVG")
    return parser.parse_args()


def choose(rows: Sequence[System], names: Sequence[str] | None) -> list[System]:
    """The rows whose names begin with one of these."""
    found = [each for each in rows if names is None or each.name.startswith(tuple(names))]
    if not found:
        raise SystemExit(f"--systems: choose from {', '.join(each.name for each in rows)}")
    return found


def row(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and spread of one system; percentiles of all its single calls."""
    rates = [sample.jobs_per_s for sample in samples]
    calls = sorted(call for sample in samples for call in sample.latencies_s)
    facts: dict[str, Any] = {
        "system": name,
        "jobs_per_s": round(statistics.median(rates)),
        "spread": [round(min(rates)), round(max(rates))],
        "worker_us_per_job": round(statistics.median(sample.worker_us for sample in samples)),
        "redis_us_per_job": round(statistics.median(sample.redis_us for sample in samples)),
    }
    if calls:
        facts["call_p50_ms"] = round(calls[len(calls) // 2] * 1000, 2)
        facts["call_p99_ms"] = round(calls[len(calls) * 99 // 100] * 1000, 2)
    return facts


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows, each beside its ratio to the best stock pool, ready for a page of docs."""
    best = best_of_stock(rows)
    table = Table(*HEADS, box=box.MARKDOWN)
    for each in rows:
        table.add_row(
            each["system"],
            f"{each['jobs_per_s']:,}",
            f"{each['spread'][0]:,} to {each['spread'][1]:,}",
            f"{each['jobs_per_s'] / best:.2f}" if best else "",
            f"{each['worker_us_per_job']:,} µs",
            f"{each['redis_us_per_job']:,} µs",
            *(f"{each[key]} ms" if key in each else "" for key in ("call_p50_ms", "call_p99_ms")),
        )
    console.print(table)


def best_of_stock(rows: Sequence[dict[str, Any]]) -> int:
    """Jobs/s of the best stock pool without events; 0 where none was run."""
    names = ("celery solo", "celery threads -c 4", "celery prefork -c 2")
    return max((each["jobs_per_s"] for each in rows if each["system"] in names), default=0)


def plot(report: dict[str, Any], target: Path) -> None:
    """Draws the rows, in an environment that has matplotlib."""
    script = Path(__file__).with_name("plot_rows.py")
    command = [python_of("plot", PLOT), script, target]
    subprocess.run(command, input=json.dumps(report), text=True, check=True)


if __name__ == "__main__":
    main()
