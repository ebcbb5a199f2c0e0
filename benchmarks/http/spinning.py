"""How long threads of torch should spin: the gateway with several counts, also with neighbours.

Each count has a Redis, worker and gateway of its own; they are asked in turn, and idle otherwise.
Neighbours are processes that compute without end. `default` is libgomp's own count, `passive` none.

    python -m benchmarks.http.spinning --neighbours 0 2 --rounds 4 --write
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.models import model_folder
from benchmarks.hardware import command, hardware, write_report
from benchmarks.http.__main__ import MODELS, ask, load_client, texts_and_vectors
from benchmarks.http.servers import Batchery
from benchmarks.queue.report import WIDTH
from benchmarks.venvs import ROOT

#: libgomp's own, and what it does with OMP_WAIT_POLICY=PASSIVE.
SPINS = {"default": "300000", "passive": "0"}

RESULTS = ROOT / "benchmarks" / "results" / "http_spinning.json"

#: How long each server is asked before the first round, in seconds.
WARM_UP_S = 1.0


def main() -> None:
    """Measures, prints a table; writes JSON if asked to."""
    options = parse()
    runs: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = model_folder(options.model, folder)
        files = texts_and_vectors(model, folder, options.max_tokens)
        servers = {each: stack.enter_context(server(model, each)) for each in options.spins}
        client = stack.enter_context(load_client())
        for each in servers.values():
            ask(client, each, files, max(options.connections), WARM_UP_S, options)
        for number in range(options.rounds):
            for count in options.neighbours:
                with neighbours(count):
                    for connections in options.connections:
                        for spins in options.spins[:: -1 if number % 2 else 1]:
                            figures = ask(
                                client, servers[spins], files, connections, options.seconds, options
                            )
                            runs.setdefault((count, connections, spins), []).append(figures)
    rows = [row_of(*key, each) for key, each in runs.items()]
    show(rows)
    report = {
        "hardware": hardware(),
        "command": command("http.spinning"),
        "model": options.model,
        "rows": rows,
    }
    write_report(options.write, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default=MODELS[0])
    add("--spins", nargs="+", default=["default", "passive", "1000", "10000"])
    add("--neighbours", nargs="+", type=int, default=[0, 2])
    add("--connections", nargs="+", type=int, default=[1, 8, 64])
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=2.0, help="of each run")
    add("--max-tokens", type=int, default=128, help="of the longest text")
    add("--write", type=Path, nargs="?", const=RESULTS, help="write all figures to this file")
    parser.set_defaults(texts=1, encoding="base64")
    return parser.parse_args()


@contextlib.contextmanager
def server(model: Path, spins: str) -> Iterator[Batchery]:
    """A Redis, a worker and a gateway whose device spins so often."""
    os.environ["GOMP_SPINCOUNT"] = SPINS.get(spins, spins)
    try:
        started = Batchery(model)
    finally:
        del os.environ["GOMP_SPINCOUNT"]
    try:
        yield started
    finally:
        started.stop()


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that compute all the time."""
    loop = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.wait()


def row_of(
    neighbours: int, connections: int, spins: str, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One row: medians over the rounds."""
    row: dict[str, Any] = {"neighbours": neighbours, "connections": connections, "spins": spins}
    for key in ("requests_per_s", "p50_ms", "p99_ms"):
        row[key] = round(statistics.median(run[key] for run in runs), 1)
    row["device_ms_per_request"] = round(
        statistics.median(run["cpu_us_per_request"]["device"] for run in runs) / 1e3, 2
    )
    row["wrong"] = sum(run["wrong"] + run["refused"] + run["lost"] for run in runs)
    row["rounds"] = [round(run["requests_per_s"], 1) for run in runs]
    return row


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table, ready for a page of docs."""
    table = Table(*rows[0], box=box.MARKDOWN)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False, width=WIDTH + 40).print(table)


if __name__ == "__main__":
    main()
