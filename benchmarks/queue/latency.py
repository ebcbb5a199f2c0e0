"""One lonely call, `delay().get()` on idle workers: ours beside Celery's own pools.

All workers are there at the same time, each with a Redis of its own, and are called in turn, so
that whatever else the machine does meets all of them.

    python -m benchmarks.queue.latency --rounds 20 --json benchmarks/results/latency.json
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Bench
from benchmarks.queue.systems import System, batchery, celery
from benchmarks.rows import choose, percentile, print_table

ROWS = (
    batchery("batchery"),
    celery("celery solo", "-P", "solo"),
    celery("celery threads -c 4", "-P", "threads", "-c", "4"),
    celery("celery prefork -c 2", "-P", "prefork", "-c", "2"),
)


class Caller:
    """A worker, and a client that calls it."""

    def __init__(self, client: "subprocess.Popen[str]") -> None:
        self._client = client
        self._line()

    def calls(self, count: int) -> list[float]:
        """How long so many calls take, one after the other, in ms."""
        assert self._client.stdin is not None
        self._client.stdin.write(f"{count}\n")
        self._client.stdin.flush()
        made: list[float] = json.loads(self._line())
        return made

    def _line(self) -> str:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise SystemExit("a client ended; its last words are above")
        return line


@contextlib.contextmanager
def caller(system: System) -> Iterator[Caller]:
    """Starts a worker with a Redis of its own, and its client."""
    with EmbeddedRedis() as server:
        bench = Bench(server, jobs=0, calls=0)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.peers.lonely_calls",
            system.module,
        ]
        with (
            bench._worker(system),
            subprocess.Popen(
                command,
                env=bench._environment(system),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as client,
        ):
            try:
                yield Caller(client)
            finally:
                client.kill()


def compare(systems: Sequence[System], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Calls workers in turn; a row for each, with percentiles of all its calls."""
    made: dict[str, list[list[float]]] = {system.name: [] for system in systems}
    with contextlib.ExitStack() as stack:
        callers = {row.name: stack.enter_context(caller(row)) for row in systems}
        for number in range(rounds):
            for name in list(callers)[:: 1 if number % 2 == 0 else -1]:
                made[name].append(callers[name].calls(calls))
    return [
        {
            "system": name,
            "p50_ms": round(percentile([*itertools.chain(*turns)], 50), 3),
            "p99_ms": round(percentile([*itertools.chain(*turns)], 99), 3),
            "best_round_ms": round(min(map(statistics.median, turns)), 3),
            "worst_round_ms": round(max(map(statistics.median, turns)), 3),
        }
        for name, turns in made.items()
    ]


def main() -> None:
    """Measures, prints a table, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="per round and worker")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    systems = choose([(row.name, row) for row in ROWS], options.systems)
    report: dict[str, Any] = {
        "hardware": hardware(),
        "rounds": options.rounds,
        "calls": options.calls,
        "rows": compare(systems, options.rounds, options.calls),
    }
    rows = report["rows"]
    print(report["hardware"])
    print_table(rows[0], (map(str, row.values()) for row in rows))
    write_report(options.json, report)


if __name__ == "__main__":
    main()
