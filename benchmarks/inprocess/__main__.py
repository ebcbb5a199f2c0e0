"""What batching in the caller's own process gives, and what it costs: ours beside others.

Callers in a closed loop, as threads and as coroutines, of a function that returns its list, of one
that sleeps, and of MiniLM with texts of log-normal length. Each system runs by itself, in a process
of its own, and every answer is checked. Other projects are installed by pip when they are first
needed, into environments of their own.

    python -m benchmarks.inprocess --json benchmarks/results/inprocess.json
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine.child import Child
from benchmarks.engine.models import MINILM_FOLDER
from benchmarks.engine.systems import INFINITY, TORCH
from benchmarks.engine.texts import describe_texts
from benchmarks.engine.vectors import TEXTS, write_vectors
from benchmarks.hardware import command, hardware, write_report
from benchmarks.peers.inprocess_peer import ASYNCIO, MODES
from benchmarks.rows import choose, in_turn, median_and_spread, print_table, show_spread
from benchmarks.venvs import python_of

#: A function that returns its list, one that sleeps, and a model.
NO_OP, SLEEP, MINILM = WORKLOADS = "no-op", "sleep", "MiniLM"

CALLERS = (1, 5, 150)

#: Maximum items of a batch in all systems, and threads of torch.
BATCH_SIZE, TORCH_THREADS = 64, 2

#: Tokens of MiniLM's longest text.
MAX_TOKENS = 128

#: The version of transformers that is ours, so that the function is the same.
BATCHERS = (TORCH, "transformers==5.23.0", "batched==0.1.5", "async-batcher==0.2.2")

HEADS = ("", "callers", "items/s", "spread", "p50", "p99")


class System(NamedTuple):
    """One way of calling a function, or a model, from many callers."""

    name: str
    #: Script in `peers/`, and what it is asked for.
    module: str
    choice: str
    #: How it can be called.
    modes: Sequence[str] = MODES
    workloads: Sequence[str] = WORKLOADS
    #: Of its environment; none means the one that runs now.
    requirements: Sequence[str] = ()


SYSTEMS = (
    # A hundred calls can sleep side by side in the time of one, which no device does.
    System("no batching", "inprocess_plain", "no batching", workloads=[NO_OP, MINILM]),
    System("lock", "inprocess_plain", "lock"),
    System("ours: batched", "inprocess_batchery", "batched"),
    System("ours: batched, length=", "inprocess_batchery", "length", workloads=[MINILM]),
    System("ours: Engine", "inprocess_batchery", "engine", [ASYNCIO], [MINILM]),
    System("batched 0.1.5", "inprocess_batched", "dynamically", requirements=BATCHERS),
    System("batched 0.1.5, aio", "inprocess_batched", "aio", [ASYNCIO], requirements=BATCHERS),
    System(
        "async-batcher 0.2.2",
        "inprocess_async_batcher",
        "process",
        [ASYNCIO],
        requirements=BATCHERS,
    ),
    System(
        "infinity_emb 0.0.78",
        "inprocess_infinity",
        "engine",
        [ASYNCIO],
        [MINILM],
        # The environment that the engine's benchmark has, too.
        requirements=INFINITY,
    ),
)


class Place(NamedTuple):
    """What a row is about."""

    workload: str
    mode: str
    callers: int
    system: str


def main() -> None:
    """Measures all rows, prints tables; writes JSON if asked to."""
    options = parse()
    chosen = choose([(each.name, each) for each in SYSTEMS], options.systems)
    # All systems inherit it.
    os.environ["OMP_NUM_THREADS"] = str(TORCH_THREADS)
    runs: dict[Place, list[Mapping[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"--batch-size": BATCH_SIZE}
        if MINILM in options.workloads:
            given |= write_vectors(MINILM_FOLDER, Path(folder), MAX_TOKENS)
        for number, system in in_turn(chosen, options.rounds):
            for workload in filter(system.workloads.__contains__, options.workloads):
                for place, figures in measure(system, workload, given, options):
                    runs[place].append(figures)
                    where = ", ".join(map(str, place))
                    print(f"round {number + 1}: {where}: {figures['items_per_s']:,.0f} items/s")
    rows = [row_of(place, each) for place, each in sorted(runs.items())]
    report = {
        "hardware": hardware(),
        "command": command("inprocess"),
        "max_batch_size": BATCH_SIZE,
        "torch_threads": TORCH_THREADS,
        "tokens_per_text": describe_texts("log-normal", TEXTS, MINILM_FOLDER, MAX_TOKENS),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows": rows,
    }
    for workload in options.workloads:
        for mode in MODES:
            some = [row for row in rows if (row["workload"], row["mode"]) == (workload, mode)]
            print_table(HEADS, map(cells, some), f"{workload}, {mode}")
    print(report["hardware"])
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--callers", nargs="+", type=int, default=CALLERS, help="at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each run, at least")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def measure(
    system: System, workload: str, given: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Runs one workload on a system that is started for it, with all numbers of callers."""
    python = python_of(system.requirements)
    asked = {"--system": system.choice, "--workload": workload, **given}
    with closing(Child(python, f"peers.{system.module}", asked)) as child:
        child.wait_ready()
        for mode in system.modes:
            for callers in options.callers:
                request = {"mode": mode, "callers": callers, "seconds": options.seconds}
                yield Place(workload, mode, callers, system.name), child.ask(request)


def row_of(place: Place, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    row = {**place._asdict(), **median_and_spread("items_per_s", [r["items_per_s"] for r in runs])}
    for key in ("p50_ms", "p99_ms"):
        row |= {key: median_and_spread(key, [run[key] for run in runs], 4)[key]}
    return row


def cells(row: Mapping[str, Any]) -> Sequence[str]:
    """A row, as `HEADS` names its figures."""
    return (
        row["system"],
        f"{row['callers']:,}",
        f"{row['items_per_s']:,}",
        show_spread(row),
        *(f"{row[key]:,.3f} ms" for key in ("p50_ms", "p99_ms")),
    )


if __name__ == "__main__":
    main()
