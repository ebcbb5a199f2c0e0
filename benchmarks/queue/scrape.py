"""What watching costs: no-op jobs by a worker without a port of metrics, with one, and scraped.

    python -m benchmarks.queue.scrape --rounds 5 --json benchmarks/results/scrape.json

The rows run in turn, to and fro. A ratio is the median of the rounds' own ratios to the worker
without a port.
"""

import argparse
import contextlib
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Bench, Sample
from benchmarks.queue.systems import System, batchery

#: Of the worker of each row: whether it has a port, and whether somebody asks there.
ROWS = {"no port": (False, False), "a port": (True, False), "a port, scraped": (True, True)}


def system(name: str, port: int) -> System:
    """The worker of a row."""
    made = batchery(name, transport="batchery")
    if not ROWS[name][0]:
        return replace(made, has_latency=False)
    environment = {**made.environment, "BATCHERY_METRICS__PORT": str(port)}
    return replace(made, environment=environment, has_latency=False)


@contextlib.contextmanager
def scraping(port: int, every_s: float, took_ms: list[float]) -> Iterator[None]:
    """Scrapes a worker meanwhile; notes how long each scrape took."""
    stopped = threading.Event()

    def scrape() -> None:
        while not stopped.wait(every_s):
            began_s = time.perf_counter()
            # The worker may not have started yet.
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as got:
                    got.read()
                took_ms.append((time.perf_counter() - began_s) * 1e3)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def measure(jobs: int, rounds: int, every_s: float) -> dict[str, Any]:
    """Runs the rows in turn; returns what is written as JSON."""
    samples: dict[str, list[Sample]] = {name: [] for name in ROWS}
    took_ms: list[float] = []
    with EmbeddedRedis() as server:
        bench = Bench(server, jobs, 0)
        for number in range(rounds):
            for name in ROWS if number % 2 == 0 else reversed(ROWS):
                port = free_port()
                with contextlib.ExitStack() as stack:
                    if ROWS[name][1]:
                        stack.enter_context(scraping(port, every_s, took_ms))
                    samples[name].append(bench.run(system(name, port)))
                print(f"round {number + 1}, {name}: {samples[name][-1].jobs_per_s:,.0f} jobs/s")
    return {
        "hardware": hardware(),
        "jobs": jobs,
        "rounds": rounds,
        "every_s": every_s,
        "scrapes": len(took_ms),
        "scrape_ms": round(statistics.median(took_ms), 1) if took_ms else None,
        "rows": [row(name, samples) for name in ROWS],
    }


def row(name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians of a row."""
    pairs = zip(samples[name], samples["no port"], strict=True)
    ratios = [one.jobs_per_s / other.jobs_per_s for one, other in pairs]
    return {
        "name": name,
        "jobs_per_s": round(statistics.median(each.jobs_per_s for each in samples[name])),
        "ratio": round(statistics.median(ratios), 4),
        "worker_us_per_job": round(statistics.median(each.worker_us for each in samples[name]), 1),
    }


def main() -> None:
    """Measures, prints a table, and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=40_000, help="a fifth of those of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two scrapes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    info = measure(options.jobs, options.rounds, options.every)
    table = Table("worker", "jobs/s", "of no port", "CPU per job", box=box.MARKDOWN)
    for each in info["rows"]:
        table.add_row(
            *(each["name"], f"{each['jobs_per_s']:,}", f"{each['ratio']:.3f}"),
            f"{each['worker_us_per_job']} µs",
        )
    console = Console(highlight=False)
    console.print(info["hardware"])
    console.print(f"{info['scrapes']} scrapes, {info['scrape_ms']} ms each")
    console.print(table)
    write_report(options.json, info)


if __name__ == "__main__":
    main()
