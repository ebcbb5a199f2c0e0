"""HTTP requests for vectors: the gateway beside infinity's own server, in one run.

Connections in a closed loop, each with one text per request, of log-normal length; MiniLM, and a
model of two tiny layers that computes next to nothing. Both servers are asked in turn, while the
other one stands still; the last vector of each text is compared with the right one.

    python -m benchmarks.http --rounds 2 --write
"""

import argparse
import contextlib
import json
import os
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

from benchmarks.engine.models import MINILM_FOLDER, model_folder
from benchmarks.engine.texts import describe_texts, read_texts
from benchmarks.hardware import command, hardware, write_report
from benchmarks.http.servers import BATCH_SIZE, HOST, Batchery, Infinity, Server
from benchmarks.queue.report import WIDTH
from benchmarks.venvs import FOLDER, ROOT

CONNECTIONS = (1, 100, 1_000)

MODELS = ("minilm", "tiny")

#: Different texts.
TEXTS = 256

TORCH_THREADS = 2

RESULTS = ROOT / "benchmarks" / "results" / "http.json"

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
        "max_tokens": options.max_tokens,
        "tokens_per_text": describe_texts("log-normal", TEXTS, MINILM_FOLDER, options.max_tokens),
        "encoding": options.encoding,
        "rows": rows,
    }
    show(rows)
    print(report["hardware"])
    write_report(options.write, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--connections", nargs="+", type=int, default=CONNECTIONS)
    add("--texts", type=int, default=1, help="in each request")
    add("--rounds", type=int, default=2)
    add("--seconds", type=float, default=10.0, help="of each run")
    add("--max-tokens", type=int, default=128, help="of the longest text")
    add("--encoding", choices=("float", "base64"), default="base64", help="of the vectors")
    add("--alone", action="store_true", help="leave infinity out")
    add("--venvs", type=Path, default=FOLDER, help="where environments of others are, or are made")
    add("--write", type=Path, nargs="?", const=RESULTS, help="write all figures to this file")
    return parser.parse_args()


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        path = model_folder(model, folder)
        files = texts_and_vectors(path, folder, options.max_tokens)
        servers: list[Server] = [Batchery(path)]
        stack.callback(servers[0].stop)
        if not options.alone:
            servers.append(Infinity(path, options.venvs))
            stack.callback(servers[1].stop)
            servers[1].pause()
        client = stack.enter_context(load_client())
        for number in range(-1, options.rounds):
            for connections in options.connections:
                for server in servers if number % 2 else reversed(servers):
                    # The first round warms up.
                    seconds = options.seconds if number >= 0 else 2.0
                    server.go_on()
                    figures = ask(client, server, files, connections, seconds, options)
                    server.pause()
                    if number >= 0:
                        runs.setdefault((server.name, connections), []).append(figures)
                        progress(model, number, server.name, connections, figures)
    return [row_of(model, *key, each) for key, each in runs.items()]


def texts_and_vectors(model: Path, folder: Path, max_tokens: int) -> dict[str, str]:
    """Files with the texts and their right vectors."""
    texts, vectors = folder / "texts.json", folder / "vectors.npy"
    texts.write_text(json.dumps(read_texts("log-normal", TEXTS, model, max_tokens)))
    given = {"--model": model, "--texts": texts, "--vectors": vectors, "--max-tokens": max_tokens}
    line = [str(part) for pair in given.items() for part in pair]
    # In a process of its own: this one never loads torch.
    script = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.inprocess_vectors"]
    subprocess.run([*script, *line], cwd=ROOT, check=True)
    return {"texts": str(texts), "vectors": str(vectors)}


@contextlib.contextmanager
def load_client() -> Iterator["subprocess.Popen[str]"]:
    """The process that sends the requests."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.http.load"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(
    client: "subprocess.Popen[str]",
    server: Server,
    files: Mapping[str, str],
    connections: int,
    seconds: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One run."""
    assert client.stdin is not None
    assert client.stdout is not None
    asked = {
        **files,
        "host": HOST,
        "port": server.port,
        "path": server.path,
        "pids": dict(server.pids()),
        "connections": connections,
        "seconds": seconds,
        "per_request": options.texts,
        "encoding": options.encoding,
    }
    print(json.dumps(asked), file=client.stdin, flush=True)
    line = client.stdout.readline()
    if not line:
        raise SystemExit("the client has ended; see above")
    figures: dict[str, Any] = json.loads(line)
    return figures


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


def progress(
    model: str, number: int, server: str, connections: int, figures: Mapping[str, Any]
) -> None:
    """Says what was measured, as it is measured."""
    print(
        f"round {number + 1}: {model}, {connections:,} connections, {server}:"
        f" {figures['requests_per_s']:,.0f} requests/s, {figures['statuses']}",
        file=sys.stderr,
        flush=True,
    )


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each model, ready for a page of docs."""
    console = Console(highlight=False, width=WIDTH + 20)
    for model in dict.fromkeys(row["model"] for row in rows):
        table = Table(*HEADS, box=box.MARKDOWN, title=model)
        for row in (each for each in rows if each["model"] == model):
            used = row["cpu_us_per_request"]
            table.add_row(
                row["server"],
                f"{row['connections']:,}",
                f"{row['requests_per_s']:,.0f}",
                f"{row['p50_ms']:,.1f} ms",
                f"{row['p99_ms']:,.1f} ms",
                f"{sum(used.values()):,.0f} µs",
                f"{used['gateway']:,.0f} µs" if "gateway" in used else "",
                str(row["wrong"]),
            )
        console.print(table)


if __name__ == "__main__":
    main()
