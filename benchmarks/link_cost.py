"""What a callback costs: no-op jobs with and without `link`, on Batchery and on Celery as it is.

The callback is sent to a queue that nobody serves, so that the rate is that of the jobs alone. A
job with a callback is completed by Celery's own tracer, on either system.

    python benchmarks/link_cost.py --rounds 5 --json benchmarks/results/link_cost.json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from batchery.embedded import EmbeddedRedis
from hardware import hardware
from queue_overhead import WIDTH, print_table, row
from queue_runs import Bench, Sample
from queue_systems import TRANSPORTS, batchery, celery, default_transport


def main() -> None:
    """Runs the four rows in turn, prints them, and how much slower a callback makes a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3000, help="per row and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, default=default_transport())
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
    samples: dict[str, list[Sample]] = {each.name: [] for each in rows}
    console = Console(highlight=False, width=WIDTH)
    with EmbeddedRedis() as server:
        bench = Bench(server, options.jobs, calls=0)
        for number in range(options.rounds):
            for each in rows if number % 2 == 0 else reversed(rows):
                console.print(f"round {number + 1} of {options.rounds}: {each.name}")
                samples[each.name].append(bench.run(each))
    report = {
        "hardware": hardware(),
        "transport": options.transport,
        "rows": [row(name, each) for name, each in samples.items()],
    }
    console.print(report["hardware"])
    print_table(console, report["rows"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
