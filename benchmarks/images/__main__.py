"""Pictures per second: files that a worker reads, decodes and embeds, beside a bare loop.

The loop is what one would write without a queue: a DataLoader with as many processes as the device
has readers, and the same model on the same processor. It has no Redis, no jobs and no results but
in memory, and may take the best of several batch sizes. Pictures are JPEG files; the whole system
gets their names as jobs, and its results are read by a client.

    python -m benchmarks.images --json benchmarks/results/images.json
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from batchery_producer import AsyncClient
from benchmarks.engine.child import Child
from benchmarks.generation.served import Served
from benchmarks.hardware import command, hardware, write_report
from benchmarks.images.files import SIZES, draw_pictures, save_model
from benchmarks.rows import in_turn, median_and_spread, print_table, print_verdicts, show_spread

#: Name of the model in the worker.
SEE = "see"

LOOP, WHOLE = "bare loop", "whole system"

#: The least share of the loop's rate that is claimed.
LEAST = 0.9


def main() -> None:
    """Runs both in turn, prints a table; writes JSON if asked to."""
    options = parse()
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        save_model(folder / "model", options.model)
        names = draw_pictures(folder / "pictures", options.pictures)
        given = {
            "--model": folder / "model",
            "--pictures": folder / "pictures",
            "--workers": options.readers,
        }
        child = Child(Path(sys.executable), "peers.dataloader_images", given)
        stack.callback(child.close)
        child.wait_ready()
        media = {"roots": [str(folder / "pictures")], "readers": options.readers}
        os.environ["BATCHERY_MEDIA"] = json.dumps(media)
        model = {"kind": "image_embedding", "model": str(folder / "model")}
        served = stack.enter_context(Served({SEE: model}))
        served.wait_ready(SEE, names[0], {})
        systems = [(f"{LOOP}, {size} a batch", size) for size in options.batch_sizes]
        rates: dict[str, list[float]] = {}
        results: dict[str, Sequence[Mapping[str, Any]]] = {}
        for _, (name, size) in in_turn([*systems, (WHOLE, 0)], options.rounds):
            run = run_loop(child, names, size) if size else run_whole(served.url, names)
            seconds, results[name] = run
            rates.setdefault(name, []).append(len(names) / seconds)
            print(f"{name}: {len(names) / seconds:,.1f} pictures/s", flush=True)
    report = make_report(options, rates, results)
    print_report(report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--model", choices=list(SIZES), default="deit-tiny")
    parser.add_argument("--readers", type=int, default=2, help="processes that decode, of both")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32], help="of the loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="writes the figures there")
    return parser.parse_args()


def run_loop(
    child: Child, names: Sequence[str], batch_size: int
) -> tuple[float, Sequence[Mapping[str, Any]]]:
    """How long the loop takes, in seconds, and its results."""
    answer = child.ask({"names": names, "batch_size": batch_size, "keep": True})
    return answer["seconds"], [json.loads(each) for each in answer["results"]]


def run_whole(url: str, names: Sequence[str]) -> tuple[float, Sequence[Mapping[str, Any]]]:
    """The same of jobs that a client sends, until it has their results."""
    began_s = time.perf_counter()
    results = asyncio.run(call_all(url, names))
    return time.perf_counter() - began_s, results


async def call_all(url: str, names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """The results of all pictures, in order."""
    async with AsyncClient(url) as client:
        call = client.task(SEE)
        results: list[Mapping[str, Any]] = await asyncio.gather(*map(call, names))
    return results


def make_report(
    options: argparse.Namespace,
    rates: Mapping[str, Sequence[float]],
    results: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Median and spread of each row, and the verdict."""
    best = max((name for name in rates if name != WHOLE), key=lambda each: median(rates[each]))
    ratio = median([ours / loop for ours, loop in zip(rates[WHOLE], rates[best], strict=True)])
    return {
        "command": command("images"),
        "hardware": hardware(),
        "model": options.model,
        "pictures": options.pictures,
        "readers": options.readers,
        "rounds": options.rounds,
        "rows": [
            {"system": name, **median_and_spread("pictures_per_s", found)}
            for name, found in rates.items()
        ],
        "largest_difference": largest_difference(results[best], results[WHOLE]),
        "verdicts": [
            {
                "claim": f"{WHOLE}: at least {LEAST:g} times the pictures/s of the {best}",
                "holds": ratio >= LEAST,
                "found": f"{ratio:.3f}",
            }
        ],
    }


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def largest_difference(
    some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> float:
    """By how much a number of a vector differs at most."""
    ours, theirs = (np.array([each["vector"] for each in found]) for found in (some, others))
    return float(np.abs(ours - theirs).max())


def print_report(report: Mapping[str, Any]) -> None:
    """Prints a table and the verdict."""
    print(report["hardware"])
    cells = [
        (row["system"], f"{row['pictures_per_s']:,}", show_spread(row)) for row in report["rows"]
    ]
    print_table(["", "pictures/s", "spread"], cells)
    print(f"largest difference of a number: {report['largest_difference']:.1e}")
    print_verdicts(report["verdicts"])


if __name__ == "__main__":
    main()
