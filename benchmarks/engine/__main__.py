"""What is left of a model's own speed: loops that anyone could write, our engine, the whole system.

The same texts and the same model in one run, every system in turn, several rounds, on one machine:
loops over transformers and torch with nothing around them; other projects that batch in the same
process, each in an environment of its own; our engine in a process; and jobs in Redis, a Celery
worker, results in Redis.

    python -m benchmarks.engine --rounds 5 --json engine.json
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine.flops import flops_of, peak_of
from benchmarks.engine.gpu import gpu_name, mean, utilisation
from benchmarks.engine.models import MODELS, shape_of
from benchmarks.engine.rows import print_rows, rows_of
from benchmarks.engine.sample import Sample, System
from benchmarks.engine.systems import NAMES, running
from benchmarks.engine.target import Target, about, target_for
from benchmarks.engine.texts import WORKLOADS, lengths_of, read_texts
from benchmarks.hardware import write_report
from benchmarks.queue.report import WIDTH

#: So many of the texts are compared: a GPU computes a hundred times more, and JSON takes minutes.
COMPARED = 512

#: Largest difference of a number in a vector between a system and the loop in arrival order.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def main() -> None:
    """Measures all workloads, prints tables; writes JSON if asked to."""
    options = parse()
    chosen = choose(options.systems)
    console = Console(highlight=False, width=WIDTH + 20)
    with target_for(options, loop_tokens=options.loop_tokens) as target:
        rows: list[dict[str, Any]] = []
        texts = {name: read_texts(name, options.texts, target.folder) for name in options.workloads}
        about_it = about(target, options, texts)
        with running(target, chosen) as systems:
            for workload in options.workloads:
                rows += measure(console, systems, target, workload, texts[workload], options)
                print_rows(console, [row for row in rows if row["workload"] == workload])
    report = {
        **about_it,
        "texts": options.texts,
        "rounds": options.rounds,
        "max_batch_size": target.batch_size,
        "loop_tokens": target.loop_tokens,
        "rows": rows,
    }
    console.print(report["hardware"])
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=list(TOLERANCE), help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--texts", type=int, default=512, help="per workload and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="max_batch_size of our rows")
    parser.add_argument("--loop-tokens", type=int, help="tokens of a batch, of some loops")
    parser.add_argument("--threads", type=int, help="of torch in every system; its own choice else")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def choose(names: Sequence[str] | None) -> list[str]:
    """The rows of these names, or whose names begin with one of these."""
    begins = tuple(each for each in names or () if each not in NAMES)
    found = [
        each for each in NAMES if names is None or each in names or each.startswith(begins or ".")
    ]
    if not found:
        raise SystemExit(f"--systems: choose from {', '.join(NAMES)}")
    return found


def measure(
    console: Console,
    systems: Sequence[System],
    target: Target,
    workload: str,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Runs one workload on all systems in turn, several rounds."""
    warm_up(systems, texts, target)
    samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
    busy: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(options.rounds):
        # To and fro, so that a machine that slows down slows all of them.
        for system in systems if number % 2 == 0 else reversed(systems):
            console.print(f"{workload}, round {number + 1} of {options.rounds}: {system.name}")
            with utilisation(target.device) as shares:
                samples[system.name].append(system.run(texts))
            busy[system.name] += shares
    lengths = lengths_of(texts, target.folder)
    rows = rows_of(workload, samples, len(texts), flops_of(shape_of(options.model), lengths))
    peak = peak_of(gpu_name(target.device) or "", target.dtype)
    for row in rows:
        row["mfu"] = peak and round(row["flops_per_s"] / peak, 4)
        row["gpu_utilisation"] = mean(busy[row["system"]])
    return rows


def warm_up(systems: Sequence[System], texts: Sequence[str], target: Target) -> None:
    """Runs every system once, and compares their first vectors.

    Raises:
        SystemExit: A system computes something else: then its speed means nothing.
    """
    expected: Sequence[Any] = ()
    for system in systems:
        some = system.run(texts[:COMPARED], keep=True).results
        if len(texts) > COMPARED:
            system.run(texts)
        vectors = [result["vector"] for result in some]
        expected = expected or vectors
        worst = max(
            abs(one - other)
            for row, right in zip(vectors, expected, strict=True)
            for one, other in zip(row, right, strict=True)
        )
        if worst > TOLERANCE[target.dtype]:
            raise SystemExit(f"{system.name}: its vectors differ by {worst:.2g} from the first's")


if __name__ == "__main__":
    main()
