"""What else a job may need costs: no-op jobs of several kinds, on Batchery and on Celery as it is.

A callback, and the body of a chord, are sent to a queue that nobody serves, so that the rate is
that of the jobs alone. Chords have 100 parts. Celery's own tracer completes jobs with callbacks,
parts of chords, and failures, on either system.

    python -m benchmarks.queue.completion_cost --json benchmarks/results/completion_cost.json
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.queue.report import report
from benchmarks.queue.runs import run_in_turn
from benchmarks.queue.systems import TRANSPORTS, System, batchery, celery

#: Values of `PEER_KIND`, and what a row of each is called.
KINDS = {
    "link": "with a callback",
    "chord": "parts of chords",
    "failure": "that fail",
    "started": "with STARTED",
}


def main() -> None:
    """Runs all rows in turn, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=3000, help="per row and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, default="batchery")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    plain = [
        batchery("batchery", transport=options.transport),
        celery("celery solo", "-P", "solo"),
    ]
    rows = [*plain, *(_of_kind(each, kind) for kind in options.kinds for each in plain)]
    samples = run_in_turn(rows, options.jobs, 0, options.rounds)
    report(
        samples,
        options.json,
        transport=options.transport,
        jobs=options.jobs,
        rounds=options.rounds,
    )


def _of_kind(system: System, kind: str) -> System:
    return replace(
        system,
        name=f"{system.name}, {KINDS[kind]}",
        environment={**system.environment, "PEER_KIND": kind},
        weight=system.weight if kind == "started" else 1.0,
    )


if __name__ == "__main__":
    main()
