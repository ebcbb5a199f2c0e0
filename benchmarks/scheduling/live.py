"""Live jobs among bulk that waits without end: how long they take, and what bulk pays for it.

Bulk jobs of the lowest priority always wait in Redis. Live jobs of the highest one, a short text
each, come by chance (Poisson). Stretches of bulk alone and of bulk with live jobs take turns on one
worker, so that both rates are of the same minutes.

    python -m benchmarks.scheduling.live --seconds 60 --per-job 256 --json live.json
"""

import argparse
import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from batchery import AsyncClient, Client
from benchmarks.engine.target import about, model_parser, target_for
from benchmarks.engine.texts import read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report
from benchmarks.rows import percentiles_ms, print_table

#: Priorities of bulk and live.
BULK, LIVE = 9, 0

#: Texts of both, and how many of them are different.
BULK_WORKLOAD, LIVE_WORKLOAD, TEXTS = "log-normal", "uniform 16", 2048

#: Length of a stretch with live jobs, and of one without, in seconds.
STRETCH_S = 5.0

#: How long one answer may take, in seconds.
TIMEOUT_S = 120.0


def send_bulk(url: str, texts: Sequence[str], per_job: int, done: Any, stop: Any) -> None:
    """Keeps bulk waiting until it is told to stop, in a process of its own; counts what is done."""

    def endless() -> Iterator[str]:
        for text in cycle(texts):
            if stop.is_set():
                return
            yield text

    with Client(url) as client:
        task = client.task("embed", queue="embed", priority=BULK)
        size = per_job if per_job > 1 else None
        for _ in task.as_completed(endless(), per_job=size, timeout_s=TIMEOUT_S):
            done.value += 1


async def measure(url: str, texts: Sequence[str], options: argparse.Namespace, done: Any) -> Any:
    """Takes turns; returns latencies of live jobs in ms, and rates of bulk alone and beside."""
    chance = random.Random(options.seed)
    latencies_ms: list[float] = []
    rates: dict[bool, list[float]] = {False: [], True: []}
    async with AsyncClient(url) as client:
        task = client.task("embed", queue="embed", priority=LIVE, timeout_s=TIMEOUT_S)

        async def call(text: str) -> None:
            began_s = time.perf_counter()
            await task(text)
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)

        for stretch in range(2 * max(1, round(options.seconds / STRETCH_S))):
            is_live = stretch % 2 == 1
            before, began_s = done.value, time.perf_counter()
            running = []
            while (left_s := began_s + STRETCH_S - time.perf_counter()) > 0:
                pause_s = chance.expovariate(options.live_per_s) if is_live else left_s
                await asyncio.sleep(min(pause_s, left_s))
                if is_live:
                    running.append(asyncio.create_task(call(chance.choice(texts))))
            seconds = time.perf_counter() - began_s
            rates[is_live].append((done.value - before) / seconds)
            await asyncio.gather(*running)
    return latencies_ms, rates


def main() -> None:
    """Measures, prints a table; writes JSON if asked to."""
    options = parse()
    with target_for(options) as target:
        names = (BULK_WORKLOAD, LIVE_WORKLOAD)
        texts = {name: read_texts(name, TEXTS, target.folder) for name in names}
        report = about(target, options, texts)
        system = WholeSystem(target, options.feeders)
        spawn = multiprocessing.get_context("spawn")
        done, stop = spawn.Value("q", 0), spawn.Event()
        arguments = (system.url, texts[BULK_WORKLOAD], options.per_job, done, stop)
        bulk = spawn.Process(target=send_bulk, args=arguments, daemon=True)
        try:
            system.wait_ready()
            bulk.start()
            while not done.value:
                time.sleep(0.1)
            latencies_ms, rates = asyncio.run(
                measure(system.url, texts[LIVE_WORKLOAD], options, done)
            )
            stop.set()
            bulk.join(TIMEOUT_S)
        finally:
            system.stop()
    alone_per_s, beside_per_s = (sum(rates[key]) / len(rates[key]) for key in (False, True))
    row = {
        "per_job": options.per_job,
        "live_jobs": len(latencies_ms),
        **percentiles_ms(latencies_ms),
        "bulk_per_s": round(alone_per_s, 1),
        "bulk_with_live_per_s": round(beside_per_s, 1),
    }
    print(report["hardware"])
    print_table(row, [map(str, row.values())])
    write_report(options.json, {**report, "seconds": options.seconds, "rows": [row]})


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = model_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="with live jobs, in all")
    parser.add_argument("--live-per-s", type=float, default=4.0, help="mean arrivals of live jobs")
    parser.add_argument("--per-job", type=int, default=1, help="texts of each bulk job")
    parser.add_argument("--feeders", type=int, default=0, help="of the device")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
