"""Whether every device is fed: 1 to 16 devices that sleep, in one worker, against linear.

A batch of 32 jobs takes a device a fixed time, in which it only sleeps: what is below linear was
lost in feeding.

    python -m benchmarks.queue.devices --rounds 3 --json benchmarks/results/devices.json
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware
from benchmarks.queue.runs import run_in_turn
from benchmarks.queue.systems import CELERY, WORKER, System

MODULE = "benchmarks.peers.sleeping_tasks"

#: As in the module.
BATCH_SIZE = 32


def system(devices: int, batch_s: float) -> System:
    """One worker with so many devices; all rows take about the same time."""
    names = ",".join(f"cpu:{index}" for index in range(devices))
    return System(
        str(devices),
        MODULE,
        (*CELERY, MODULE, *WORKER, "-c", "1"),
        environment={"BATCHERY_DEVICES": names, "PEER_BATCH_S": str(batch_s)},
        weight=float(devices),
        has_latency=False,
    )


def main() -> None:
    """Runs all rows in turn; prints jobs/s beside what linear would be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--batch-s", type=float, default=0.1, help="how long a batch takes")
    parser.add_argument("--jobs", type=int, default=1600, help="per device and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    systems = [system(count, options.batch_s) for count in options.devices]
    samples = run_in_turn(systems, options.jobs, 0, options.rounds)
    rows = []
    for count in options.devices:
        rate = statistics.median(each.jobs_per_s for each in samples[str(count)])
        linear = count * BATCH_SIZE / options.batch_s
        rows.append(
            {"devices": count, "jobs_per_s": round(rate), "of_linear": round(rate / linear, 3)}
        )
    facts = {"hardware": hardware(), "batch_s": options.batch_s, "rows": rows}
    show(facts)
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def show(facts: dict[str, Any]) -> None:
    """Prints the table, ready for a page of docs."""
    made = Table("devices", "jobs/s", "of linear", box=box.MARKDOWN)
    for each in facts["rows"]:
        made.add_row(str(each["devices"]), f"{each['jobs_per_s']:,}", f"{each['of_linear']:.2f}")
    console = Console(highlight=False, width=100)
    console.print(facts["hardware"])
    console.print(f"a batch of {BATCH_SIZE} takes {facts['batch_s']:g} s")
    console.print(made)


if __name__ == "__main__":
    main()
