"""What the queue costs: no-op jobs through Batchery, through Celery's own pools, and elsewhere.

Every system runs the same jobs in the same run, in turn, on a private redis-server: all published
before the worker starts, results stored, acknowledged late, one worker, no logging, no task events
unless the row says so. The clock runs from a tenth of the results to the last, so that neither the
worker's start nor the publishing counts.

    python -m benchmarks.queue --rounds 5 --json queue.json

Other systems are installed by pip when they are first needed, each into an environment of its own.
"""

import argparse
from pathlib import Path

from benchmarks.queue.report import report
from benchmarks.queue.runs import run_in_turn
from benchmarks.queue.systems import systems
from benchmarks.rows import choose
from benchmarks.venvs import python_of


def main() -> None:
    """Runs all systems in turn, prints a table; writes JSON if asked to."""
    options = parse()
    chosen = choose([(each.name, each) for each in systems()], options.systems)
    for system in chosen:
        python_of(system.requirements)
    samples = run_in_turn(chosen, options.jobs, options.calls, options.rounds)
    report(samples, options.json, jobs=options.jobs, rounds=options.rounds)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4000, help="per round; fast systems get more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=200, help="single calls per round, or 0")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
