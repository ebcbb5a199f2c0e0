"""What batching in the caller's own process gives, and what it costs: ours beside others.

Callers in a closed loop, as threads and as coroutines, of a function that returns its list, of one
that sleeps, and of MiniLM with texts of log-normal length. Each system has a process of its own,
all of them run in turn within a round, and every answer is checked. Other projects are installed
by pip when they are first needed, into environments of their own.

    python -m benchmarks.inprocess --write
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine.models import MINILM_FOLDER
from benchmarks.engine.texts import describe_texts, read_texts
from benchmarks.hardware import command, hardware, write_report
from benchmarks.inprocess.rows import Place, print_idle, print_rows, row_of
from benchmarks.inprocess.systems import (
    LEFT_OUT,
    MINILM,
    MODES,
    SYSTEMS,
    WORKLOADS,
    Running,
    System,
    missing,
    start,
)
from benchmarks.queue.report import WIDTH
from benchmarks.venvs import FOLDER, ROOT

CALLERS = (1, 5, 100, 150, 1_000)

#: More callers would wait for minutes, where a text takes 10 to 30 ms.
MINILM_CALLERS = 150

#: Maximum items of a batch in all systems, and threads of torch.
BATCH_SIZE, TORCH_THREADS = 64, 2

#: Different texts.
TEXTS = 256

#: Answers that each caller gets at least, however slow a system is.
ANSWERS = 2

#: What a system may still finish before its idling is measured, in seconds.
SETTLE_S = 0.5

Runs = dict[tuple[str, Place], list[Mapping[str, Any]]]


def main() -> None:
    """Measures all rows, prints tables; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH + 20)
    chosen, skipped = choose(options)
    # All systems inherit it.
    os.environ["OMP_NUM_THREADS"] = str(TORCH_THREADS)
    with running(chosen, options) as systems:
        runs = measure(systems, options)
        idle = idle_rows(systems, options.idle) if options.idle else []
        versions = {each.system.name: each.versions for each in systems}
    own = {system.name for system in chosen if system.has_own_model}
    rows = [row_of(name, at, each, compares=name not in own) for (name, at), each in runs.items()]
    report = {
        "hardware": hardware(),
        "command": command("inprocess"),
        "versions": versions,
        "skipped": {**LEFT_OUT, **skipped},
        "max_batch_size": BATCH_SIZE,
        "torch_threads": TORCH_THREADS,
        "max_tokens": options.max_tokens,
        "tokens_per_text": describe_texts("log-normal", TEXTS, MINILM_FOLDER, options.max_tokens),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows": rows,
        "idle": idle,
    }
    print_rows(console, rows)
    if idle:
        print_idle(console, idle)
    for name, why in report["skipped"].items():
        console.print(f"not measured: {name}: {why}")
    console.print(report["hardware"])
    write_report(options.write, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="NAME")
    add(
        "--callers",
        nargs="+",
        type=int,
        help=f"at a time; by default {CALLERS}, for MiniLM up to {MINILM_CALLERS}",
    )
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=0.5, help="of each run; slow systems take longer")
    add(
        "--idle",
        type=float,
        default=10.0,
        help="seconds without calls, once per system; 0 for none",
    )
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--systems", nargs="+", metavar="NAME", help="those whose name begins with one of these")
    add("--max-tokens", type=int, default=128, help="of MiniLM's longest text")
    add("--venvs", type=Path, default=FOLDER, help="where environments of others are, or are made")
    add(
        "--write",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks" / "results" / "inprocess.json",
        help="write all figures to this file; to benchmarks/results if none is named",
    )
    return parser.parse_args()


def choose(options: argparse.Namespace) -> tuple[list[System], dict[str, str]]:
    """Systems to run, and those that cannot be run, with the reason.

    Raises:
        SystemExit: No system has such a name.
    """
    begins = tuple(options.systems or [""])
    named = [system for system in SYSTEMS if system.name.startswith(begins)]
    if not named:
        raise SystemExit(f"--systems: choose from {', '.join(each.name for each in SYSTEMS)}")
    wanted = [
        system
        for system in named
        if set(system.workloads) & set(options.workloads) and set(system.modes) & set(options.modes)
    ]
    skipped = {system.name: missing(system) for system in wanted if missing(system)}
    return [system for system in wanted if system.name not in skipped], skipped


@contextlib.contextmanager
def running(chosen: Sequence[System], options: argparse.Namespace) -> Iterator[list[Running]]:
    """Starts systems, warm, and ends them when the block ends."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        given: dict[str, Any] = {"--max-tokens": options.max_tokens}
        if MINILM in options.workloads:
            given |= minilm(Path(folder), options.max_tokens)
        systems: list[Running] = []
        for system in chosen:
            systems.append(start(system, {**given, "--batch-size": BATCH_SIZE}, options.venvs))
            stack.callback(systems[-1].child.stop)
        for each in systems:
            wanted = [name for name in options.workloads if name in each.system.workloads]
            each.child.send({"do": "load", "workloads": wanted})
        for each in systems:
            each.child.wait_ready()
            each.versions = each.child.receive()
            each.suspend()
        for each in systems:
            print(f"warming up: {each.system.name}", file=sys.stderr, flush=True)
            each.ask({"do": "warm_up"})
        yield systems


def minilm(folder: Path, max_tokens: int) -> dict[str, Any]:
    """What all systems are told of MiniLM: its files, its texts, and their right vectors."""
    texts, vectors = folder / "texts.json", folder / "vectors.npy"
    words = read_texts("log-normal", TEXTS, MINILM_FOLDER, max_tokens)
    texts.write_text(json.dumps(words), encoding="utf-8")
    given = {"--model": MINILM_FOLDER, "--texts": texts, "--vectors": vectors}
    # In a process of its own: this one never loads torch.
    line = [str(part) for pair in {**given, "--max-tokens": max_tokens}.items() for part in pair]
    script = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.inprocess_vectors"]
    subprocess.run([*script, *line], cwd=ROOT, check=True)
    return given


def measure(systems: Sequence[Running], options: argparse.Namespace) -> Runs:
    """Runs everything on all systems in turn, several rounds."""
    runs: Runs = defaultdict(list)
    for number in range(options.rounds):
        for place in places(options):
            # To and fro, so that a machine that slows down slows all of them.
            for each in systems if number % 2 == 0 else reversed(systems):
                if place.workload in each.system.workloads and place.mode in each.system.modes:
                    answer = each.ask(
                        {
                            "do": "run",
                            "workload": place.workload,
                            "mode": place.mode,
                            "callers": place.callers,
                            "seconds": options.seconds,
                            "answers": ANSWERS,
                        }
                    )
                    runs[each.system.name, place].append(answer)
                    progress(number, place, each.system.name, answer)
    return runs


def places(options: argparse.Namespace) -> Iterator[Place]:
    """What is run, in this order."""
    for workload in options.workloads:
        for mode in options.modes:
            for callers in options.callers or CALLERS:
                if options.callers or workload != MINILM or callers <= MINILM_CALLERS:
                    yield Place(workload, mode, callers)


def progress(number: int, place: Place, name: str, answer: Mapping[str, Any]) -> None:
    """Says what was measured, as it is measured."""
    about = f"round {number + 1}: {place.workload}, {place.mode}, {place.callers:,} callers, {name}"
    rate = f"{answer['items_per_s']:,.0f} items/s" if answer["items"] else answer["error"]
    print(f"{about}: {rate}", file=sys.stderr, flush=True)


def idle_rows(systems: Sequence[Running], seconds: float) -> list[dict[str, Any]]:
    """What all systems do while nobody calls: at the same time, as each leaves the cores free."""
    request = {"do": "idle", "seconds": seconds, "settle_s": SETTLE_S}
    for each in systems:
        each.resume()
        each.child.send(request)
    rows = []
    for each in systems:
        answer = {key: round(value, 3) for key, value in each.child.receive().items()}
        rows.append({"system": each.system.name, **answer})
    return rows


if __name__ == "__main__":
    main()
