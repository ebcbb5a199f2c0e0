"""Requests at several concurrencies: one by one, against batched, through the whole system.

So many callers at a time, each of which waits for its result before it sends the next text. Both
rows are the same worker and the same model; one queue has batches of one. The bare row is a loop
over transformers with no queue: tokenize, compute, encode one text, then the next.

    python -m benchmarks.engine.requests --model bert-base --json requests.json
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.child import Child, options_of
from benchmarks.engine.client import Client, Window
from benchmarks.engine.target import Target, about, model_parser, target_for
from benchmarks.engine.texts import WORKLOADS, read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report
from benchmarks.rows import (
    PERCENTS,
    in_turn,
    median_and_spread,
    percentiles_ms,
    print_table,
    show_spread,
)

#: Name of a row -> its queue.
QUEUES = {"one by one": "embed_one", "batched": "embed"}

#: Callers at a time.
CONCURRENCIES = (1, 5, 100, 150)

#: How long each row of a round is measured, and how long its callers have called before, in
#: seconds. On a GPU a batch of a new size costs more than a hundred of a known one.
SECONDS, WARM_UP_S = 10.0, 3.0

#: Texts that are sent again and again.
TEXTS = 2048

BARE = "bare forward"

#: Name of a row, and how many callers at a time.
Case = tuple[str, int]

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
    with target_for(options, {"embed": options.batch_size, "embed_one": 1}) as target:
        texts = read_texts(options.workload, TEXTS, target.folder)
        cases = [(BARE, 1), *((name, count) for count in options.concurrency for name in QUEUES)]
        report = {
            **about(target, options, {options.workload: texts}),
            "texts": options.workload,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rows": [],
        }
        for rows in measure(target, cases, texts, options):
            report["rows"] = rows
            # After each row: a run that is cut off has what was measured until then.
            write_report(options.json, report)
    print(report["hardware"])
    print_table(HEADS, map(cells, report["rows"]))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = model_parser(__doc__, "bert-base")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="log-normal")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a row and round")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds before each")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def measure(
    target: Target,
    cases: Sequence[Case],
    texts: Sequence[str],
    options: argparse.Namespace,
) -> Iterator[list[dict[str, Any]]]:
    """Runs every case in turn, several rounds; yields the rows so far after each."""
    taken: dict[Case, list[Window]] = {case: [] for case in cases}
    child = Child(Path(sys.executable), "peers.offline_loops", options_of(target))
    system = WholeSystem(target)
    seconds, warm_up_s = options.seconds, options.warm_up
    try:
        child.wait_ready()
        system.wait_ready()
        message = system.message()
        for number, (name, count) in in_turn(cases, options.rounds):
            print(f"round {number + 1} of {options.rounds}: {name}, {count} at a time", flush=True)
            if name == BARE:
                request = {"loop": "single", "texts": texts}
                child.ask({**request, "seconds": warm_up_s})
                window = Window(**child.ask({**request, "seconds": seconds}))
            else:
                queue = QUEUES[name]
                window = asyncio.run(
                    flood(system.url, message, queue, texts, count, warm_up_s, seconds)
                )
            taken[name, count].append(window)
            yield [row_of(options.workload, case, taken) for case in cases if taken[case]]
    finally:
        child.close()
        system.stop()


async def flood(
    url: str,
    message: bytes,
    queue: str,
    texts: Sequence[str],
    concurrency: int,
    warm_up_s: float,
    seconds: float,
) -> Window:
    """Measures one row by a client of its own; see `Client.measure`."""
    async with Client(url, message) as client:
        return await client.measure(queue, texts, concurrency, warm_up_s, seconds)


def row_of(
    workload: str,
    case: Case,
    taken: Mapping[Case, Sequence[Window]],
) -> dict[str, Any]:
    """Median and spread of one row, percentiles of all its requests."""
    name, count = case
    latencies_ms = [each * 1e3 for window in taken[case] for each in window.taken_s]
    own = [window.per_s for window in taken[case]]
    single = [window.per_s for window in taken.get(("one by one", count), ())]
    row: dict[str, Any] = {
        "system": name,
        "workload": workload,
        "concurrency": count,
        "requests": len(latencies_ms),
        **median_and_spread("texts_per_s", own),
        **percentiles_ms(latencies_ms),
    }
    if single:
        # The last round may not be whole yet.
        ratios = [mine / other for mine, other in zip(own, single, strict=False)]
        row["of_one_by_one"] = round(statistics.median(ratios), 2)
    if count == 1 and (BARE, 1) in taken:
        medians = [
            [statistics.median(window.taken_s) for window in taken[each]]
            for each in (case, (BARE, 1))
        ]
        row["p50_of_bare"] = round(
            statistics.median(mine / other for mine, other in zip(*medians, strict=False)), 3
        )
    return row


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """A row, as `HEADS` names its figures."""
    return (
        row["system"],
        str(row["concurrency"]),
        f"{row['texts_per_s']:,}",
        show_spread(row),
        f"{row['of_one_by_one']:.1f}" if "of_one_by_one" in row else "",
        *(f"{row[f'p{percent}_ms']:,} ms" for percent in PERCENTS),
        f"{row['p50_of_bare']:.2f}" if "p50_of_bare" in row else "",
    )


if __name__ == "__main__":
    main()
