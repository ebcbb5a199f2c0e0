"""What bulk clients cost: publish only, collect only, and both, beside Celery's and others' ways.

No-op jobs on a private redis-server, results stored, one worker: Celery's solo pool for Celery's
rows, Batchery's for ours and wherever Celery's results are only collected, its own for any other
system, which is installed by pip when it is first needed, into an environment of its own.

    python -m benchmarks.bulk --items 100000 --max-items 1000000 --json benchmarks/results/bulk.json
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.systems import OTHERS, System, batchery, celery
from benchmarks.rows import choose, in_turn, median_and_spread, print_table, show_spread
from benchmarks.venvs import child_environment, python_of

#: Longest time for one row, in seconds.
TIMEOUT_S = 1800.0

HEADS = ("", "", "items", "items/s", "spread", "of the first", "peak")

KINDS = PUBLISH, COLLECT, WHOLE = "publish", "collect", "end to end"

STOCK = celery("celery", "-P", "solo").worker
OURS = batchery("batchery").worker


@dataclass(frozen=True, slots=True)
class Row:
    """One way of doing one of three things."""

    what: str
    name: str
    #: Function in rows.py; of another system, what its module in peers shall do.
    function: str
    #: Arguments of Python that start the worker; none means that no worker runs.
    worker: Sequence[str] = ()
    #: Items, as a part of what was asked for: slow ways shall take seconds, not minutes.
    weight: float = 1.0
    #: None is Celery, with or without Batchery.
    system: System | None = field(default=None, compare=False)

    @property
    def python(self) -> Path:
        """In whose environment client and worker run."""
        if self.system:
            return python_of(self.system.requirements)
        return Path(sys.executable)

    @property
    def client(self) -> Sequence[str]:
        """Arguments of Python that start the client, without the number of items."""
        if self.system:
            return ["-m", self.system.module, self.function]
        return ["-m", "benchmarks.bulk.rows", self.function]


#: Other systems, and what of theirs is measured: calls for many jobs, where there are any.
PEERS = {
    "Dramatiq 2.2": ("group.run", "get_results", "group"),
    "RQ 3.0 SimpleWorker": ("enqueue_many", "latest_result", "enqueue_many + latest_result"),
    "SAQ 0.26": ("enqueue, 200 at a time", "Queue.jobs", "Queue.map"),
    "taskiq 0.13": ("kiq, 200 at a time", "gather", "kiq + gather"),
}


def others(what: str) -> Iterator[Row]:
    """Rows of other systems."""
    kind = KINDS.index(what)
    for system in OTHERS:
        if calls := PEERS.get(system.name):
            worker = () if what == PUBLISH else system.worker
            name = f"{system.name}, {calls[kind]}"
            yield Row(what, name, ("publish", "collect", "whole")[kind], worker, 0.05, system)


#: The first row of each kind is what the others are compared with.
ROWS = (
    Row(PUBLISH, "delay", "publish_delay", weight=0.05),
    Row(PUBLISH, "Producer.batch", "publish_batch", weight=0.05),
    *others(PUBLISH),
    Row(PUBLISH, "batchery", "publish_batchery"),
    Row(COLLECT, "get", "collect_get", OURS, 0.05),
    Row(COLLECT, "join_native", "collect_join", OURS, 0.05),
    *others(COLLECT),
    Row(COLLECT, "batchery", "collect_batchery", OURS),
    Row(WHOLE, "delay + get, solo worker", "whole_get", STOCK, 0.05),
    Row(WHOLE, "group + join_native, solo worker", "whole_group", STOCK, 0.05),
    Row(WHOLE, "delay + get, batchery worker", "whole_get", OURS, 0.05),
    *others(WHOLE),
    Row(WHOLE, "map", "whole_map", OURS),
    Row(WHOLE, "map, 8 items per job", "whole_multi_item_8", OURS, 2.0),
    Row(WHOLE, "map, 64 items per job", "whole_multi_item_64", OURS, 5.0),
    Row(WHOLE, "map, 64 items per job, batches of 1,024", "whole_multi_item_large", OURS, 10.0),
    Row(WHOLE, "await, 1,000 at a time", "whole_await", OURS, 0.5),
)


def main() -> None:
    """Runs all rows in turn, prints a table; writes JSON if asked to."""
    options = parse()
    some = [(row.name, row) for row in ROWS if row.what in options.what]
    rows = choose(some, options.systems)
    for row in rows:
        assert row.python.is_file()  # Installed now, and not between two rows.
    samples: dict[Row, list[dict[str, Any]]] = {row: [] for row in rows}
    with EmbeddedRedis() as server:
        for number, row in in_turn(rows, options.rounds):
            print(f"round {number + 1} of {options.rounds}: {row.what}, {row.name}", flush=True)
            samples[row].append(run(row, server.url, max(int(options.items * row.weight), 100)))
        if options.max_items:
            row = Row(WHOLE, f"map, {options.max_items:,} jobs", "whole_map", OURS)
            print(f"once: {row.what}, {row.name}", flush=True)
            samples[row] = [run(row, server.url, options.max_items)]
    report = {
        "hardware": hardware(),
        "items": options.items,
        "rounds": options.rounds,
        "rows": [info(row, each) for row, each in samples.items()],
    }
    print(report["hardware"])
    print_table(HEADS, cells(report["rows"]))
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000, help="of our rows; others get fewer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--max-items", type=int, default=0, metavar="N", help="once more `map`, with so many items"
    )
    parser.add_argument("--what", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def run(row: Row, url: str, items: int) -> dict[str, Any]:
    """Measures one row.

    Raises:
        SystemExit: It failed.
    """
    with Redis.from_url(url) as redis:
        redis.flushall()
    environment = child_environment(PEER_URL=url)
    with worker(row, url, environment):
        answer = subprocess.run(
            [row.python, "-W", "ignore", *row.client, str(items)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    if answer.returncode:
        raise SystemExit(f"{row.what}, {row.name}: {answer.stderr}")
    sample: dict[str, Any] = json.loads(answer.stdout.strip().rpartition("\n")[2])
    return sample


@contextlib.contextmanager
def worker(row: Row, url: str, environment: dict[str, str]) -> Iterator[None]:
    """Runs a worker, if one is wanted; the first jobs wait until it is there."""
    if not row.worker:
        yield
        return
    process = subprocess.Popen(
        [row.python, "-W", "ignore", *(each.format(url=url) for each in row.worker)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        # Some have children.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def info(row: Row, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of one row."""
    rates = [each["items"] / each["seconds"] for each in samples]
    return {
        "what": row.what,
        "how": row.name,
        "items": samples[0]["items"],
        **median_and_spread("items_per_s", rates, None),
        "peak_mib": max(each["peak_mib"] for each in samples),
    }


def cells(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """The rows, each beside its ratio to the first of its kind."""
    firsts: dict[str, float] = {}
    for each in rows:
        first = firsts.setdefault(each["what"], each["items_per_s"])
        yield (
            each["what"],
            each["how"],
            f"{each['items']:,}",
            f"{each['items_per_s']:,}",
            show_spread(each),
            f"{each['items_per_s'] / first:.1f}",
            f"{each['peak_mib']} MiB",
        )


if __name__ == "__main__":
    main()
