"""HTTP requests for vectors: the gateway beside infinity's own server, in one run.

Connections in a closed loop, each with one text per request, of log-normal length; MiniLM, and a
model of two tiny layers that computes next to nothing. Both servers are asked in turn, while the
other one stands still; the last vector of each text is compared with the right one.

    python -m benchmarks.http --rounds 2 --json benchmarks/results/http.json
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.engine.child import Child
from benchmarks.engine.models import MINILM_FOLDER, model_folder
from benchmarks.engine.texts import describe_texts
from benchmarks.engine.vectors import TEXTS, write_vectors
from benchmarks.hardware import command, hardware, write_report
from benchmarks.http.servers import BATCH_SIZE, Batchery, Infinity, Server
from benchmarks.rows import print_table

CONNECTIONS = (1, 100, 1_000)

MODELS = ("minilm", "tiny")

#: Tokens of the longest text.
MAX_TOKENS = 128

TORCH_THREADS = 2

HEADS = ("", "connections", "requests/s", "p50", "p99", "CPU per request", "of it HTTP", "wrong")


def main() -> None:
    """Measures, prints tables; writes JSON if asked to."""
    options = parse()
    os.environ["OMP_NUM_THREADS"] = str(TORCH_THREADS)
    rows = [row for model in options.models for row in measure(model, options)]
    report = {
        "hardware": hardware(),
        "command": command("http"),
        "max_batch_size": BATCH_SIZE,
        "torch_threads": TORCH_THREADS,
        "tokens_per_text": describe_texts("log-normal", TEXTS, MINILM_FOLDER, MAX_TOKENS),
        "rows": rows,
    }
    show(rows)
    print(report["hardware"])
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--connections", nargs="+", type=int, default=CONNECTIONS)
    parser.add_argument("--texts", type=int, default=1, help="in each request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--alone", action="store_true", help="leave infinity out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path = model_folder(model, folder)
        given = write_vectors(path, folder, MAX_TOKENS)
        servers: list[Server] = [Batchery(path)]
        stack.callback(servers[0].stop)
        if not options.alone:
            servers.append(Infinity(path))
            stack.callback(servers[1].stop)
            servers[1].pause()
        client = stack.enter_context(closing(Child(Path(sys.executable), "http.load", given)))
        client.wait_ready()
        for number in range(-1, options.rounds):
            for connections in options.connections:
                for server in servers if number % 2 else reversed(servers):
                    # The first round warms up.
                    seconds = options.seconds if number >= 0 else 2.0
                    server.go_on()
                    figures = client.ask(
                        {
                            "port": server.port,
                            "path": server.path,
                            "pids": dict(server.pids()),
                            "connections": connections,
                            "seconds": seconds,
                            "per_request": options.texts,
                        }
                    )
                    server.pause()
                    if number >= 0:
                        runs.setdefault((server.name, connections), []).append(figures)
                        about = f"{model}, {connections:,} connections, {server.name}"
                        rate = f"{figures['requests_per_s']:,.0f} requests/s"
                        print(f"round {number + 1}: {about}: {rate}, {figures['statuses']}")
    return [row_of(model, *key, each) for key, each in runs.items()]


def row_of(
    model: str, server: str, connections: int, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One row: medians over the rounds."""
    row: dict[str, Any] = {"model": model, "server": server, "connections": connections}
    for key in ("requests_per_s", "p50_ms", "p99_ms"):
        row[key] = round(statistics.median(run[key] for run in runs), 2)
    row["cpu_us_per_request"] = {
        name: round(statistics.median(run["cpu_us_per_request"][name] for run in runs), 1)
        for name in runs[0]["cpu_us_per_request"]
    }
    row["wrong"] = sum(run["wrong"] + run["refused"] + run["lost"] for run in runs)
    row["statuses"] = [run["statuses"] for run in runs]
    row["rounds"] = [round(run["requests_per_s"], 1) for run in runs]
    return row


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        made = []
        for row in (each for each in rows if each["model"] == model):
            used = row["cpu_us_per_request"]
            made.append(
                (
                    row["server"],
                    f"{row['connections']:,}",
                    f"{row['requests_per_s']:,.0f}",
                    f"{row['p50_ms']:,.1f} ms",
                    f"{row['p99_ms']:,.1f} ms",
                    f"{sum(used.values()):,.0f} µs",
                    f"{used['gateway']:,.0f} µs" if "gateway" in used else "",
                    str(row["wrong"]),
                )
            )
        print_table(HEADS, made, model)


if __name__ == "__main__":
    main()
