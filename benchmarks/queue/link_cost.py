"""What a callback costs: no-op jobs with and without `link`, on Batchery and on Celery as it is.

The callback is sent to a queue that nobody serves, so that the rate is that of the jobs alone. A
job with a callback is completed by Celery's own tracer, on either system.

    python -m benchmarks.queue.link_cost --rounds 5 --json benchmarks/results/link_cost.json
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.queue.report import report
from benchmarks.queue.runs import run_in_turn
from benchmarks.queue.systems import TRANSPORTS, batchery, celery


def main() -> None:
    """Runs the four rows in turn, prints them, and how much slower a callback makes a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3000, help="per row and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, default="batchery")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    plain = [
        batchery("batchery", transport=options.transport),
        celery("celery solo", "-P", "solo"),
    ]
    linked = [
        replace(
            each,
            name=f"{each.name}, with link",
            environment={**each.environment, "PEER_LINK": "1"},
            weight=1.0,
        )
        for each in plain
    ]
    rows = [each for pair in zip(plain, linked, strict=True) for each in pair]
    samples = run_in_turn(rows, options.jobs, 0, options.rounds)
    report(
        samples,
        options.json,
        transport=options.transport,
        jobs=options.jobs,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
