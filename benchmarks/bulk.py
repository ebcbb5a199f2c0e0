"""What bulk clients cost: publish only, collect only, and both, beside Celery's own ways.

No-op jobs on a private redis-server, results stored, one worker: Celery's solo pool for Celery's
rows, Batchery's for ours and wherever results are only collected.

    python benchmarks/bulk.py --items 100000 --json benchmarks/results/bulk.json
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from rich import box
from rich.console import Console
from rich.table import Table

from batchery.embedded import EmbeddedRedis
from hardware import hardware

#: Longest time for one row, in seconds.
TIMEOUT_S = 1800.0

STOCK = ("peers.celery_stock", "-P", "solo")
OURS = ("peers.batchery_tasks",)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of doing one of three things."""

    what: str
    name: str
    #: Function in bulk_rows.py.
    function: str
    #: App of the worker, and its options; none means that no worker runs.
    worker: Sequence[str] = ()
    #: Items, as a part of what was asked for: slow ways shall take seconds, not minutes.
    weight: float = 1.0


#: The first row of each kind is what the others are compared with.
ROWS = (
    Row("publish", "delay", "publish_delay", weight=0.05),
    Row("publish", "Producer.batch", "publish_batch", weight=0.05),
    Row("publish", "Producer.batch, results ignored", "publish_batch_ignoring", weight=0.1),
    Row("publish", "batchery", "publish_batchery"),
    Row("collect", "get", "collect_get", OURS, 0.05),
    Row("collect", "join_native", "collect_join", OURS, 0.05),
    Row("collect", "batchery", "collect_batchery", OURS),
    Row("end to end", "delay + get, solo worker", "whole_get", STOCK, 0.05),
    Row("end to end", "group + join_native, solo worker", "whole_group", STOCK, 0.05),
    Row("end to end", "delay + get, batchery worker", "whole_get", OURS, 0.05),
    Row("end to end", "map", "whole_map", OURS),
    Row("end to end", "map, 64 items per job", "whole_packed", OURS, 5.0),
    Row("end to end", "await, 1,000 at a time", "whole_await", OURS, 0.5),
)


def main() -> None:
    """Runs all rows in turn, prints a table; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=120)
    rows = [each for each in ROWS if options.what is None or each.what in options.what]
    samples: dict[Row, list[dict[str, Any]]] = {row: [] for row in rows}
    with EmbeddedRedis() as server:
        for number in range(options.rounds):
            # To and fro, so that a machine that slows down slows all of them.
            for row in rows if number % 2 == 0 else reversed(rows):
                console.print(f"round {number + 1} of {options.rounds}: {row.what}, {row.name}")
                samples[row].append(run(row, server.url, max(int(options.items * row.weight), 100)))
    report = {
        "hardware": hardware(),
        "items": options.items,
        "rounds": options.rounds,
        "rows": [facts(row, each) for row, each in samples.items()],
    }
    console.print(report["hardware"])
    console.print(table(report["rows"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000, help="of our rows; others get fewer")
    parser.add_argument("--rounds", type=int, default=3)
    kinds = sorted({row.what for row in ROWS})
    parser.add_argument("--what", nargs="+", choices=kinds, help="only these rows")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def run(row: Row, url: str, items: int) -> dict[str, Any]:
    """Measures one row.

    Raises:
        SystemExit: It failed.
    """
    with Redis.from_url(url) as redis:
        redis.flushall()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PEER_URL": url}
    script = Path(__file__).with_name("bulk_rows.py")
    with worker(row.worker, environment):
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", script, row.function, str(items)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    if answer.returncode:
        raise SystemExit(f"{row.what}, {row.name}: {answer.stderr}")
    sample: dict[str, Any] = json.loads(answer.stdout)
    return sample


@contextlib.contextmanager
def worker(row: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    """Runs a worker, if one is wanted; the first jobs wait until it is there."""
    if not row:
        yield
        return
    app, *options = row
    common = ["-l", "ERROR", "--without-mingle", "--without-gossip"]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "celery", "-A", app, "worker", *common, *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def facts(row: Row, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of one row."""
    rates = [each["items"] / each["seconds"] for each in samples]
    return {
        "what": row.what,
        "how": row.name,
        "items": samples[0]["items"],
        "items_per_s": round(statistics.median(rates)),
        "spread": [round(min(rates)), round(max(rates))],
        "peak_mib": max(each["peak_mib"] for each in samples),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows, each beside its ratio to the first of its kind, ready for a page of docs."""
    shown = Table("", "", "items", "items/s", "spread", "of the first", "peak", box=box.MARKDOWN)
    firsts: dict[str, float] = {}
    for each in rows:
        first = firsts.setdefault(each["what"], each["items_per_s"])
        shown.add_row(
            each["what"],
            each["how"],
            f"{each['items']:,}",
            f"{each['items_per_s']:,}",
            f"{each['spread'][0]:,} to {each['spread'][1]:,}",
            f"{each['items_per_s'] / first:.1f}",
            f"{each['peak_mib']} MiB",
        )
    return shown


if __name__ == "__main__":
    main()
