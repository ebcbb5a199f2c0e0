"""How long jobs wait at a share of the capacity, and whether memory grows meanwhile.

Jobs arrive by chance, one by one (Poisson), at 80 % of what the worker does when jobs are always
waiting, through Redis and a worker with its device. A job should not wait longer than for what
runs when it comes, and for what is full and next: `max_wait_ms` and two forward passes.

    python -m benchmarks.load --seconds 600 --json benchmarks/results/load.json
"""

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.gpu import used_mib
from benchmarks.engine.models import MODELS
from benchmarks.engine.target import about, target_for
from benchmarks.engine.texts import WORKLOADS, read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report
from benchmarks.load.run import Load, Observed
from benchmarks.queue.report import WIDTH

#: Runs that measure the capacity, after one that warms up.
ROUNDS = 3

#: Distinct texts.
TEXTS = 2048

PERCENTS = (50, 95, 99)

#: Share, and MiB, by which memory may grow after the first fifth of a run: allocators keep what
#: the largest batch so far took, and a larger one may always come.
FLAT_SHARE, FLAT_MIB = 0.03, 8.0


def main() -> None:
    """Measures the capacity, runs the load, prints tables; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    os.environ["BATCHERY_MAX_WAIT_MS"] = str(options.max_wait_ms)
    with target_for(options) as target:
        texts = read_texts(options.workload, TEXTS, target.folder)
        about_it = about(target, options, {options.workload: texts})
        system = WholeSystem(target)
        try:
            system.wait_ready()
            backlog = texts[: options.texts]
            capacity = options.capacity or capacity_of(system, backlog)
            console.print(f"capacity: {capacity:,.1f} jobs/s; {options.load:.0%} of it from now on")
            load = Load(system.redis, system.message(), "embed", system.processes)
            with used_mib(options.device) as device_mib:
                seen = load.run(texts, options.load * capacity, options.seconds, options.seed)
            # Where the machine has become slower meanwhile, the load was a larger share.
            after = None if options.capacity else round(capacity_of(system, backlog), 1)
        finally:
            system.stop()
    for row, mib in zip(seen.memory, device_mib, strict=False):
        row["gpu"] = mib
    report = {
        **about_it,
        "capacity_per_s": round(capacity, 1),
        "capacity_after_per_s": after,
        **report_of(seen, options),
    }
    print_report(console, report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="log-normal")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--capacity", type=float, help="jobs/s; measured else")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of each run for the capacity")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch; its own choice else")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def capacity_of(system: WholeSystem, texts: Sequence[str]) -> float:
    """Jobs per second while jobs are always waiting."""
    rates = [len(texts) / system.run(texts).seconds for _ in range(ROUNDS + 1)]
    return statistics.median(rates[1:])


def report_of(seen: Observed, options: argparse.Namespace) -> dict[str, Any]:
    """Percentiles, memory, and a verdict of each claim."""
    wait = row_of("queue wait, at most", [wait_ms for _, wait_ms in seen.waits_ms])
    forward = row_of("forward, by batch", list(seen.forward_ms.values()))
    of_jobs = row_of("forward, by job", [seen.forward_ms[batch] for batch, _ in seen.waits_ms])
    memory = {
        name: growth([row[name] for row in seen.memory if name in row])
        for name in (seen.memory[0] if seen.memory else ())
    }
    return {
        "workload": options.workload,
        "max_batch_size": options.batch_size,
        "max_wait_ms": options.max_wait_ms,
        "load": options.load,
        "seconds": options.seconds,
        "seed": options.seed,
        "jobs": len(seen.lags_ms),
        "failed_jobs": seen.failed,
        "mean_batch_size": round(len(seen.waits_ms) / max(1, len(seen.forward_ms)), 1),
        "generator_cpu": round(seen.cpu_s / options.seconds, 3),
        "rows": [wait, forward, of_jobs, row_of("published too late", seen.lags_ms)],
        "memory": memory,
        "memory_rows": seen.memory[:: max(1, len(seen.memory) // 60)],
        "verdicts": verdicts_of(seen, wait, forward, memory, options.max_wait_ms),
    }


def verdicts_of(
    seen: Observed,
    wait: Mapping[str, Any],
    forward: Mapping[str, Any],
    memory: Mapping[str, dict[str, float]],
    max_wait_ms: float,
) -> list[dict[str, Any]]:
    """What is claimed, whether it holds, and what was found."""
    bound_ms = round(max_wait_ms + 2 * forward["p99_ms"], 2)
    longer = share_longer(seen, max_wait_ms)
    return [
        {
            "claim": "every job succeeds",
            "holds": not seen.failed,
            "found": f"{seen.failed:,} of {len(seen.lags_ms):,} failed",
        },
        {
            "claim": "p99 of the wait is under max_wait_ms and two forward times, p99",
            "holds": wait["p99_ms"] < bound_ms,
            "found": f"{wait['p99_ms']:,} ms, of {bound_ms:,} ms",
        },
        {
            "claim": "99 % wait no longer than max_wait_ms and the two forward times before",
            "holds": longer <= 0.01,
            "found": f"{longer:.2%} wait longer",
        },
        *(
            {
                "claim": f"memory of {name} is flat",
                "holds": is_flat(each),
                "found": f"{each['grown_mib']:+,} MiB at {each['early_mib']:,} MiB",
            }
            for name, each in memory.items()
        ),
    ]


def share_longer(seen: Observed, max_wait_ms: float) -> float:
    """Share of the jobs that waited longer than for the two batches before their own."""
    known = [
        (wait_ms, seen.forward_ms[batch - 1] + seen.forward_ms[batch - 2])
        for batch, wait_ms in seen.waits_ms
        if {batch - 1, batch - 2} <= seen.forward_ms.keys()
    ]
    longer = sum(wait_ms > max_wait_ms + before_ms for wait_ms, before_ms in known)
    return longer / max(1, len(known))


def row_of(name: str, values_ms: Sequence[float]) -> dict[str, Any]:
    """Percentiles of one thing."""
    cuts = (
        statistics.quantiles(values_ms, n=100, method="inclusive")
        if len(values_ms) > 1
        else [0.0] * 99
    )
    return {
        "what": name,
        "count": len(values_ms),
        **{f"p{percent}_ms": round(cuts[percent - 1], 2) for percent in PERCENTS},
        "longest_ms": round(max(values_ms, default=0.0), 2),
    }


def growth(mib: Sequence[float]) -> dict[str, float]:
    """How much more the last fifth of a run holds than the second: the first warms up."""
    fifth = max(1, len(mib) // 5)
    early, late = max(mib[fifth : 2 * fifth] or mib), max(mib[-fifth:])
    return {"early_mib": early, "late_mib": late, "grown_mib": round(late - early, 1)}


def is_flat(grown: dict[str, float]) -> bool:
    """Whether that is no growth to speak of."""
    return grown["grown_mib"] <= max(FLAT_MIB, FLAT_SHARE * grown["early_mib"])


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Prints figures and verdicts."""
    console.print(report["hardware"])
    if report["capacity_after_per_s"]:
        console.print(f"capacity afterwards: {report['capacity_after_per_s']:,} jobs/s")
    console.print(
        f"{report['jobs']:,} jobs in {report['seconds']:g} s,"
        f" {report['mean_batch_size']} a batch; the generator took"
        f" {report['generator_cpu']:.1%} of a core"
    )
    table = Table("", *(f"p{percent}" for percent in PERCENTS), "longest", box=box.MARKDOWN)
    for row in report["rows"]:
        table.add_row(
            row["what"],
            *(f"{row[f'p{percent}_ms']:,} ms" for percent in PERCENTS),
            f"{row['longest_ms']:,} ms",
        )
    console.print(table)
    for each in report["verdicts"]:
        console.print(f"{'yes' if each['holds'] else 'NO'}: {each['claim']}: {each['found']}")


if __name__ == "__main__":
    main()
