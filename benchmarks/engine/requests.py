"""Requests at several concurrencies: one by one, against batched, through the whole system.

So many callers at a time, each of which waits for its result before it sends the next text. Both
rows are the same worker and the same model; one queue has batches of one. The bare row is a loop
over transformers with no queue: tokenize, compute, encode one text, then the next.

    python -m benchmarks.engine.requests --model bert-base --json requests.json
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.child import Child, options_of
from benchmarks.engine.client import Client
from benchmarks.engine.models import MODELS
from benchmarks.engine.target import Target, about, target_for
from benchmarks.engine.texts import WORKLOADS, texts_of
from benchmarks.engine.worker import WholeSystem
from benchmarks.queue.report import WIDTH

#: Name of a row -> its queue.
QUEUES = {"one by one": "embed_one", "batched": "embed"}

#: Callers at a time.
CONCURRENCIES = (1, 5, 100, 150)

#: Requests of a row and round where nobody says, by kind of device: a CPU takes a tenth of a second
#: for one of `bert-large`. And as many for each caller at least, so that all of them wait.
REQUESTS = {"cpu": 50, "cuda": 300}
PER_CALLER = 2

#: Requests of each row before the clock starts, on a CPU, and their concurrency.
WARM_UP, WARM_UP_CALLERS = 16, 8

BARE = "bare forward"

#: Name of a row, and how many callers at a time.
Case = tuple[str, int]

#: What each figure is of the latencies of all rounds.
PERCENTS = (50, 95, 99)

HEADS = (
    "",
    "concurrency",
    "texts/s",
    "spread",
    "of one by one",
    "p50",
    "p95",
    "p99",
    "p50 of bare",
)


def main() -> None:
    """Measures all concurrencies of one model, prints a table; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    with target_for(options, {"embed": options.batch_size, "embed_one": 1}) as target:
        requests = options.requests or REQUESTS[options.device.partition(":")[0]]
        most = max(requests, PER_CALLER * max(options.concurrency), WARM_UP)
        texts = texts_of(options.workload, most, target.folder)
        cases = {
            (name, count): texts[: max(requests, PER_CALLER * count)]
            for count in options.concurrency
            for name in QUEUES
        }
        cases = {(BARE, 1): texts[:requests], **cases}
        rows = measure(console, target, cases, options)
    report = {
        **about(target, options),
        "texts": options.workload,
        "rounds": options.rounds,
        "cuda_graphs": options.cuda_graphs,
        "rows": rows,
    }
    console.print(report["hardware"])
    print_rows(console, rows)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="bert-base")
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="log-normal")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--requests", type=int, help="of a row and round, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, help="of torch in every system; its own choice else")
    parser.add_argument("--cuda-graphs", choices=["auto", "never"], default="never")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def measure(
    console: Console,
    target: Target,
    cases: Mapping[Case, Sequence[str]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Runs every case in turn, several rounds, each over its own texts."""
    taken: dict[Case, list[list[float]]] = {case: [] for case in cases}
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    child = Child(Path(sys.executable), "offline_loops", options_of(target))
    system = WholeSystem(target)
    try:
        child.wait_ready()
        system.wait_ready()
        message = system.message()

        def send(name: str, texts: Sequence[str], count: int) -> list[float]:
            if name == BARE:
                times: list[float] = child.ask({"loop": "single", "texts": texts})["latencies_s"]
                return times
            return asyncio.run(flood(system.url, message, QUEUES[name], texts, count))

        # A GPU's libraries choose kernels by shape, so there every text runs once.
        warm = None if target.device.startswith("cuda") else WARM_UP
        for name, count in cases:
            send(name, cases[name, count][:warm], min(count, WARM_UP_CALLERS))
        for number in range(options.rounds):
            for name, count in cases:
                console.print(f"round {number + 1} of {options.rounds}: {name}, {count} at a time")
                started_s = time.perf_counter()
                times = send(name, cases[name, count], count)
                taken[name, count].append(times)
                rates[name, count].append(len(times) / (time.perf_counter() - started_s))
    finally:
        child.stop()
        system.stop()
    return [row_of(options.workload, case, taken, rates) for case in cases]


async def flood(
    url: str, message: bytes, queue: str, texts: Sequence[str], concurrency: int
) -> list[float]:
    """Sends all texts by a client of its own; see `Client.flood`."""
    async with Client(url, message) as client:
        return await client.flood(queue, texts, concurrency)


def row_of(
    workload: str,
    case: Case,
    taken: Mapping[Case, Sequence[Sequence[float]]],
    rates: Mapping[Case, Sequence[float]],
) -> dict[str, Any]:
    """Median and spread of one row, percentiles of all its requests."""
    name, count = case
    latencies = [each for times in taken[case] for each in times]
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    own, single = rates[case], rates.get(("one by one", count))
    row: dict[str, Any] = {
        "system": name,
        "workload": workload,
        "concurrency": count,
        "requests": len(latencies),
        "texts_per_s": round(statistics.median(own), 1),
        "spread": [round(min(own), 1), round(max(own), 1)],
        **{f"p{percent}_ms": round(cuts[percent - 1] * 1e3, 2) for percent in PERCENTS},
    }
    if single:
        ratios = [mine / other for mine, other in zip(own, single, strict=True)]
        row["of_one_by_one"] = round(statistics.median(ratios), 2)
    if count == 1 and (BARE, 1) in taken:
        bare = map(statistics.median, taken[BARE, 1])
        own_s = map(statistics.median, taken[case])
        row["p50_of_bare"] = round(
            statistics.median(mine / other for mine, other in zip(own_s, bare, strict=True)), 3
        )
    return row


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows, ready for a page of docs."""
    table = Table(*HEADS, box=box.MARKDOWN)
    for row in rows:
        table.add_row(
            row["system"],
            str(row["concurrency"]),
            f"{row['texts_per_s']:,}",
            f"{row['spread'][0]:,} to {row['spread'][1]:,}",
            f"{row['of_one_by_one']:.1f}" if "of_one_by_one" in row else "",
            *(f"{row[f'p{percent}_ms']:,} ms" for percent in PERCENTS),
            f"{row['p50_of_bare']:.2f}" if "p50_of_bare" in row else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
