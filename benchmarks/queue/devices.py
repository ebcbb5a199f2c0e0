"""Whether every device is fed: 1 to 16 devices that sleep, in one worker and in as many workers.

A batch of 32 jobs takes a device a fixed time, in which it only sleeps: what is below linear was
lost in feeding.

    python -m benchmarks.queue.devices --rounds 3 --json benchmarks/results/devices.json
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.__main__ import plot
from benchmarks.queue.runs import Sample, run_in_turn
from benchmarks.queue.systems import WORKER, System

MODULE = "benchmarks.peers.sleeping_tasks"

#: As in the module.
BATCH_SIZE = 32


#: Where the devices are -> the row's name.
PLACES = {"one": "{} devices in one worker", "own": "{} workers with one device"}


def system(devices: int, place: str, batch_s: float) -> System:
    """So many devices; all rows take about the same time."""
    in_one = place == "one"
    names = ",".join(f"cpu:{index}" for index in range(devices if in_one else 1))
    several = ("-m", "benchmarks.peers.several_workers", str(1 if in_one else devices), MODULE)
    return System(
        PLACES[place].format(devices),
        MODULE,
        (*several, *WORKER[1:], "-c", "1"),
        environment={"BATCHERY_DEVICES": names, "PEER_BATCH_S": str(batch_s)},
        weight=float(devices),
        has_latency=False,
    )


def main() -> None:
    """Runs all rows in turn; prints jobs/s beside what linear would be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--batch-s", type=float, default=0.1, help="how long a batch takes")
    parser.add_argument("--jobs", type=int, default=1600, help="per device and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the rows into this file, an SVG")
    options = parser.parse_args()
    cases = [
        (devices, place)
        for place in options.places
        for devices in options.devices
        # One worker with one device is the same in both places.
        if devices > 1 or place == options.places[0]
    ]
    systems = [system(*case, options.batch_s) for case in cases]
    samples = run_in_turn(systems, options.jobs, 0, options.rounds)
    rows = [row(samples, *case, options.batch_s) for case in cases]
    info = {
        "hardware": hardware(),
        "batch_s": options.batch_s,
        "jobs": options.jobs,
        "rounds": options.rounds,
        "rows": rows,
    }
    show(info)
    write_report(options.json, info)
    if options.plot:
        plot(info, options.plot)


def row(
    samples: Mapping[str, Sequence[Sample]], devices: int, place: str, batch_s: float
) -> dict[str, Any]:
    """The figures of one system."""
    name = PLACES[place].format(devices)
    rates = [each.jobs_per_s for each in samples[name]]
    rate = statistics.median(rates)
    return {
        "system": name,
        "jobs_per_s": round(rate),
        "spread": [round(min(rates)), round(max(rates))],
        "of_linear": round(rate / (devices * BATCH_SIZE / batch_s), 3),
        "worker_us": round(statistics.median(each.worker_us for each in samples[name]), 1),
    }


def show(info: dict[str, Any]) -> None:
    """Prints the table, ready for a page of docs."""
    made = Table("", "jobs/s", "of linear", "worker CPU per job", box=box.MARKDOWN)
    for each in info["rows"]:
        rate, cpu = f"{each['jobs_per_s']:,}", f"{each['worker_us']:.0f} µs"
        made.add_row(each["system"], rate, f"{each['of_linear']:.2f}", cpu)
    console = Console(highlight=False, width=100)
    console.print(info["hardware"])
    console.print(f"a batch of {BATCH_SIZE} takes {info['batch_s']:g} s")
    console.print(made)


if __name__ == "__main__":
    main()
