"""What the queue costs: no-op jobs through Batchery, through Celery's own pools, and elsewhere.

Every system runs the same jobs in the same run, in turn, on a private redis-server: all published
before the worker starts, results stored, acknowledged late, one worker, no logging, no task events
unless the row says so. The clock runs from a tenth of the results to the last, so that neither the
worker's start nor the publishing counts.

    python -m benchmarks.queue --rounds 5 --json queue.json --plot queue.svg

Other systems are installed by pip when they are first needed, each into an environment of its own.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.queue.report import report
from benchmarks.queue.runs import run_in_turn
from benchmarks.queue.systems import TRANSPORTS, System, systems
from benchmarks.venvs import ROOT, python_of

PLOT = ("matplotlib==3.11.2",)


def main() -> None:
    """Runs all systems in turn, prints a table; writes JSON and a plot if asked to."""
    options = parse()
    chosen = choose(systems(options.transport), options.systems)
    for system in chosen:
        python_of(system.venv, system.requirements)
    samples = run_in_turn(chosen, options.jobs, options.calls, options.rounds)
    info = report(
        samples,
        options.json,
        transport=options.transport,
        jobs=options.jobs,
        rounds=options.rounds,
    )
    if options.plot:
        plot(info, options.plot)


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
        "--transport", choices=TRANSPORTS, default="batchery", help="of our own rows"
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


def plot(info: dict[str, Any], target: Path) -> None:
    """Draws the rows, in an environment that has matplotlib."""
    command = [str(python_of("plot", PLOT)), "-m", "benchmarks.plot_rows", str(target.absolute())]
    subprocess.run(command, input=json.dumps(info), text=True, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
