"""One lonely call, `delay().get()` on idle workers: ours beside Celery's own pools, and its hops.

All workers are there at the same time, each with a Redis of its own, and are called in turn, so
that whatever else the machine does meets all of them. Then the hops of ours, from notes of the
time that its processes make.

    python -m benchmarks.queue.latency --rounds 20 --json benchmarks/results/latency.json
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.__main__ import choose
from benchmarks.queue.runs import Bench
from benchmarks.queue.systems import System, batchery, celery

ROWS = (
    batchery("batchery", transport="batchery"),
    celery("celery solo", "-P", "solo"),
    celery("celery threads -c 4", "-P", "threads", "-c", "4"),
    celery("celery prefork -c 2", "-P", "prefork", "-c", "2"),
)

#: What a call passes, in order; of other notes, or a second one of a call, nobody asks.
HOPS = (
    "published",
    "woken",
    "fetch sent",
    "fetched",
    "admitted",
    "dispatched",
    "sent to the device",
    "on the device",
    "computing",
    "computed",
    "commit sent",
    "commit answered",
    "answered",
    "settled",
    "returned",
)

#: These may be noted after the call has returned, which is once its result is published.
AFTER_COMMIT = ("commit answered", "answered", "settled")

#: Calls after which a process has written what it had noted before.
CHUNK = 100

#: How long after, in nanoseconds.
LATE_NS = 1_000_000

Calls = list[tuple[int, int, int]]


class Caller:
    """A worker, and a client that calls it."""

    def __init__(self, client: "subprocess.Popen[str]") -> None:
        self._client = client
        self._line()

    def calls(self, count: int) -> Calls:
        """Makes so many calls, one after the other."""
        assert self._client.stdin is not None
        self._client.stdin.write(f"{count}\n")
        self._client.stdin.flush()
        made: Calls = json.loads(self._line())
        return made

    def _line(self) -> str:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise SystemExit("a client ended; its last words are above")
        return line


@contextlib.contextmanager
def caller(system: System, trace: str = "") -> Iterator[Caller]:
    """Starts a worker with a Redis of its own, and its client.

    Args:
        system: The worker's row.
        trace: Folder for the notes of `traced_tasks`.
    """
    system = replace(system, environment={**system.environment, "PEER_TRACE": trace})
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
    made: dict[str, list[Calls]] = {system.name: [] for system in systems}
    with contextlib.ExitStack() as stack:
        callers = {row.name: stack.enter_context(caller(row)) for row in systems}
        for number in range(rounds):
            for name in list(callers)[:: 1 if number % 2 == 0 else -1]:
                made[name].append(callers[name].calls(calls))
    return [
        {
            "system": name,
            "p50_ms": percentile_ms(itertools.chain(*turns), 50),
            "p99_ms": percentile_ms(itertools.chain(*turns), 99),
            "best_round_ms": round(min(map(typical_ns, turns)) / 1e6, 3),
            "worst_round_ms": round(max(map(typical_ns, turns)) / 1e6, 3),
        }
        for name, turns in made.items()
    ]


def hops(rounds: int, calls: int) -> list[dict[str, Any]]:
    """When a call passes each hop, in microseconds after it began; medians of the best round."""
    traced = replace(
        ROWS[0],
        module="benchmarks.peers.traced_tasks",
        worker=[each.replace("batchery_tasks", "traced_tasks") for each in ROWS[0].worker],
    )
    with tempfile.TemporaryDirectory() as folder:
        with caller(traced, folder) as made:
            done = min((made.calls(calls) for _ in range(rounds)), key=typical_ns)
            # Until all notes of those are written.
            made.calls(CHUNK)
        notes = sorted(note for file in Path(folder).iterdir() for note in notes_of(file))
    passed: dict[str, list[float]] = {hop: [] for hop in HOPS}
    for begin, published, end in done:
        first = {"published": published, "returned": end}
        for at, hop in notes[bisect(notes, (begin,)) : bisect(notes, (end + LATE_NS,))]:
            if hop not in first and (hop not in AFTER_COMMIT or "commit sent" in first):
                first[hop] = at
        for hop, at in first.items():
            passed[hop].append((at - begin) / 1e3)
    rows = [{"hop": hop, "us": round(statistics.median(passed[hop]))} for hop in HOPS]
    return sorted(rows, key=lambda row: row["us"])


def typical_ns(made: Calls) -> float:
    """The median of how long calls took."""
    return statistics.median(end - begin for begin, _, end in made)


def percentile_ms(made: Iterable[tuple[int, int, int]], percent: int) -> float:
    """A percentile of how long calls took."""
    took_ns = [end - begin for begin, _, end in made]
    return round(statistics.quantiles(took_ns, n=100, method="inclusive")[percent - 1] / 1e6, 3)


def notes_of(file: Path) -> Iterator[tuple[int, str]]:
    """Moment and hop of each note of one process."""
    for line in file.read_text(encoding="ascii").splitlines():
        at, _, hop = line.partition(" ")
        yield int(at), hop


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of equal keys."""
    made = Table(*rows[0], box=box.MARKDOWN)
    for row in rows:
        made.add_row(*map(str, row.values()))
    return made


def main() -> None:
    """Measures, prints tables, and writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="per round and worker")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    report = {
        "hardware": hardware(),
        "rounds": options.rounds,
        "calls": options.calls,
        "rows": compare(choose(ROWS, options.systems), options.rounds, options.calls),
        "hops": hops(options.rounds, options.calls),
    }
    Console(highlight=False).print(report["hardware"], table(report["rows"]), table(report["hops"]))
    write_report(options.json, report)


if __name__ == "__main__":
    main()
