"""What computing equal texts once saves, and what it costs where no two are equal.

Two workers with the same model, each with a Redis of its own: one with a cache, one without. Both
get the same jobs in turn, in several rounds; the cache is emptied before each run but the last.

    python -m benchmarks.engine.single_flight --threads 1 --json single_flight.json
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from batchery import to_numpy
from benchmarks.engine.models import MODELS
from benchmarks.engine.sample import Sample
from benchmarks.engine.target import about, target_for
from benchmarks.engine.texts import WORKLOADS, read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report

#: Shares of the jobs that repeat another one's text; 1 is a cache that has them all.
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)

#: How far a vector may be from that of another batch, in each number.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


def main() -> None:
    """Measures, prints a table, writes JSON if asked to."""
    options = parse()
    with target_for(options) as target:
        drawn = read_texts(options.workload, options.texts, target.folder)
        # No two are equal but those that shall be.
        texts = [f"{text} {number}" for number, text in enumerate(drawn)]
        about_it = about(target, options, {options.workload: texts})
        systems = {}
        try:
            systems["plain"] = WholeSystem(target)
            _switch_on()
            systems["cached"] = WholeSystem(target)
            for system in systems.values():
                system.wait_ready()
            rows = measure(systems, texts, options.rounds, TOLERANCE[target.dtype])
        finally:
            for system in systems.values():
                system.stop()
    report = {**about_it, "rounds": options.rounds, "texts": options.texts, "rows": rows}
    print_table(rows)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="log-normal")
    parser.add_argument("--texts", type=int, default=1000, help="jobs of one run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; all cores if unset")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser.parse_args()


def _switch_on() -> None:
    models = json.loads(os.environ["BATCHERY_MODELS"])
    models["embed"]["cache"] = True
    os.environ["BATCHERY_MODELS"] = json.dumps(models)


def measure(
    systems: dict[str, WholeSystem], texts: Sequence[str], rounds: int, tolerance: float
) -> list[dict[str, Any]]:
    """One row for each share of repeats, and one for a cache that has them all."""
    rows = []
    for share in SHARES:
        # The last time, everything is in the cache that the row before has left.
        jobs = repeated(texts, min(share, SHARES[-2]))
        seen: dict[str, list[Sample]] = {name: [] for name in systems}
        for number in range(rounds):
            # To and fro, so that a machine that slows down slows both.
            for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
                if share < 1:
                    forget(systems[name])
                seen[name].append(systems[name].run(jobs, keep=number == 0))
        check(seen["plain"][0], seen["cached"][0], tolerance)
        rows.append(row_of(share, len(set(jobs)) if share < 1 else 0, seen))
    return rows


def repeated(texts: Sequence[str], share: float) -> list[str]:
    """As many texts, of which so many are there more than once, in any order."""
    draw = random.Random(share)
    different = texts[: max(1, round(len(texts) * (1 - share)))]
    jobs = [different[index % len(different)] for index in range(len(texts))]
    draw.shuffle(jobs)
    return jobs


def forget(system: WholeSystem) -> None:
    """Empties the cache."""
    keys = system.redis.keys("batchery:cache*")
    if keys:
        system.redis.delete(*keys)


def check(plain: Sample, cached: Sample, tolerance: float) -> None:
    """Ends the benchmark if a vector is not the one that it should be."""
    pairs = zip(plain.results, cached.results, strict=True)
    worst = max(float(np.abs(to_numpy(one) - to_numpy(other)).max()) for one, other in pairs)
    if worst > tolerance:
        raise SystemExit(f"vectors differ by {worst}")


def row_of(share: float, different: int, seen: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians of some rounds; ratios are taken within a round."""
    count = len(seen["plain"][0].results)
    row: dict[str, Any] = {"repeats": share, "jobs": count, "different": different}
    for name, samples in seen.items():
        cpu_ms = {
            process: statistics.median(each.cpu_s[process] for each in samples) / count * 1e3
            for process in samples[0].cpu_s
        }
        row[name] = {
            "jobs_per_s": count / statistics.median(each.seconds for each in samples),
            "tokens": statistics.median(each.tokens for each in samples),
            "cpu_ms": cpu_ms,
        }
    pairs = list(zip(seen["plain"], seen["cached"], strict=True))
    row["faster"] = statistics.median(one.seconds / other.seconds for one, other in pairs)
    row["cpu_ratio"] = statistics.median(
        sum(one.cpu_s.values()) / sum(other.cpu_s.values()) for one, other in pairs
    )
    return row


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """What the JSON says, for people."""
    table = Table("repeats", "different", box=box.SIMPLE)
    for head in ("plain, jobs/s", "cached, jobs/s", "faster", "less processor time", "tokens"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            f"{row['repeats']:.0%}",
            str(row["different"]),
            f"{row['plain']['jobs_per_s']:,.1f}",
            f"{row['cached']['jobs_per_s']:,.1f}",
            f"{row['faster']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['cached']['tokens'] / max(1, row['plain']['tokens']):.1%}",
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
