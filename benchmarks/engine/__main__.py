"""What is left of a model's own speed: loops that anyone could write, our engine, the whole system.

The same texts and the same model in one run, every system in turn, several rounds, on one machine:
loops over transformers and torch with nothing around them; other projects that batch in the same
process, each in an environment of its own; our engine in a process; and jobs in Redis, a Celery
worker, results in Redis.

    python -m benchmarks.engine --rounds 5 --json engine.json
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.flops import flops_of
from benchmarks.engine.gpu import mean, utilisation
from benchmarks.engine.models import shape_of
from benchmarks.engine.rows import print_rows, rows_of
from benchmarks.engine.sample import Sample, System
from benchmarks.engine.systems import FED, NAMES, running
from benchmarks.engine.target import Target, about, model_parser, target_for
from benchmarks.engine.texts import WORKLOADS, lengths_of, read_texts
from benchmarks.hardware import write_report
from benchmarks.rows import choose, in_turn

#: So many of the texts are compared: a GPU computes a hundred times more, and JSON takes minutes.
COMPARED = 512

#: Largest difference of a number in a vector between a system and the loop in arrival order.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def main() -> None:
    """Measures all workloads, prints tables; writes JSON if asked to."""
    options = parse()
    names = [*NAMES, *FED] if options.systems else NAMES
    chosen = choose([(name, name) for name in names], options.systems)
    with target_for(options, loop_tokens=options.loop_tokens) as target:
        rows: list[dict[str, Any]] = []
        texts = {name: read_texts(name, options.texts, target.folder) for name in options.workloads}
        about_it = about(target, options, texts)
        with running(target, chosen) as systems:
            for workload in options.workloads:
                found = measure(systems, target, workload, texts[workload], options)
                print_rows(workload, found)
                rows += found
    report = {
        **about_it,
        "texts": options.texts,
        "rounds": options.rounds,
        "max_batch_size": target.batch_size,
        "loop_tokens": target.loop_tokens,
        "rows": rows,
    }
    print(report["hardware"])
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = model_parser(__doc__, batch_size=256)
    parser.add_argument("--texts", type=int, default=512, help="per workload and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    parser.add_argument("--loop-tokens", type=int, help="tokens of a batch, of some loops")
    return parser.parse_args()


def measure(
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
    for number, system in in_turn(systems, options.rounds):
        print(f"{workload}, round {number + 1} of {options.rounds}: {system.name}", flush=True)
        with utilisation(target.device) as shares:
            samples[system.name].append(system.run(texts))
        busy[system.name] += shares
    lengths = lengths_of(texts, target.folder)
    rows = rows_of(workload, samples, len(texts), flops_of(shape_of(options.model), lengths))
    for row in rows:
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
