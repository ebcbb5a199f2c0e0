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
from typing import Any

from benchmarks.engine.gpu import used_mib
from benchmarks.engine.target import about, model_parser, target_for
from benchmarks.engine.texts import WORKLOADS, read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report
from benchmarks.load.run import Load, Observed
from benchmarks.rows import PERCENTS, percentiles_ms, print_table, print_verdicts

#: Runs that measure the capacity, after one that warms up.
ROUNDS = 3

#: Distinct texts.
TEXTS = 2048

#: Share, and MiB, by which memory may grow after the first fifth of a run: allocators keep what
#: the largest batch so far took, and a larger one may always come.
FLAT_SHARE, FLAT_MIB = 0.03, 8.0


def main() -> None:
    """Measures the capacity, runs the load, prints tables; writes JSON if asked to."""
    options = parse()
    os.environ["BATCHERY_MAX_WAIT_MS"] = str(options.max_wait_ms)
    with target_for(options) as target:
        texts = read_texts(options.workload, TEXTS, target.folder)
        about_it = about(target, options, {options.workload: texts})
        system = WholeSystem(target)
        try:
            system.wait_ready()
            backlog = texts[: options.texts]
            capacity = options.capacity or capacity_of(system, backlog)
            print(f"capacity: {capacity:,.1f} jobs/s; {options.load:.0%} of it from now on")
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
    print_report(report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = model_parser(__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="log-normal")
    parser.add_argument("--max-wait-ms", type=float, default=0.0)
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity")
    parser.add_argument("--capacity", type=float, help="jobs/s; measured else")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of each run for the capacity")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
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
    return {
        "what": name,
        "count": len(values_ms),
        **percentiles_ms(values_ms),
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


def print_report(report: dict[str, Any]) -> None:
    """Prints figures and verdicts."""
    print(report["hardware"])
    if report["capacity_after_per_s"]:
        print(f"capacity afterwards: {report['capacity_after_per_s']:,} jobs/s")
    print(
        f"{report['jobs']:,} jobs in {report['seconds']:g} s,"
        f" {report['mean_batch_size']} a batch; the generator took"
        f" {report['generator_cpu']:.1%} of a core"
    )
    figures = [*(f"p{percent}" for percent in PERCENTS), "longest"]
    print_table(
        ["", *figures],
        [
            (row["what"], *(f"{row[f'{each}_ms']:,} ms" for each in figures))
            for row in report["rows"]
        ],
    )
    print_verdicts(report["verdicts"])


if __name__ == "__main__":
    main()
