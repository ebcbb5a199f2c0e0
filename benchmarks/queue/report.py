"""What the queue benchmark reports: one row per system, as a table and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Sample
from benchmarks.rows import median_and_spread, percentile, print_table, show_spread

HEADS = ("", "jobs/s", "spread", "of stock's best", "worker CPU", "Redis CPU", "call p50", "p99")

#: Stock pools without events, with the best of which the others are compared.
STOCK = ("celery solo", "celery threads -c 4", "celery prefork -c 2")


def report(samples: Mapping[str, Sequence[Sample]], target: Path | None, **options: Any) -> None:
    """Prints a table of all rows.

    Args:
        samples: Of each row, by its name.
        target: Written as JSON, too, where not None.
        options: How they were measured.
    """
    rows = [row(name, each) for name, each in samples.items()]
    info = {"hardware": hardware(), **options, "rows": rows}
    print(info["hardware"])
    best = max((each["jobs_per_s"] for each in rows if each["system"] in STOCK), default=0)
    print_table(HEADS, [cells(each, best) for each in rows])
    write_report(target, info)


def row(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and spread of one system; percentiles of all its single calls."""
    calls_ms = [call * 1e3 for sample in samples for call in sample.latencies_s]
    info: dict[str, Any] = {
        "system": name,
        **median_and_spread("jobs_per_s", [sample.jobs_per_s for sample in samples], None),
        "worker_us_per_job": round(statistics.median(sample.worker_us for sample in samples)),
        "redis_us_per_job": round(statistics.median(sample.redis_us for sample in samples)),
    }
    if calls_ms:
        info |= {f"call_p{each}_ms": round(percentile(calls_ms, each), 2) for each in (50, 99)}
    return info


def cells(row: Mapping[str, Any], best: int) -> Sequence[str]:
    """A row beside its ratio to the best stock pool, if that was run."""
    return (
        row["system"],
        f"{row['jobs_per_s']:,}",
        show_spread(row),
        f"{row['jobs_per_s'] / best:.2f}" if best else "",
        f"{row['worker_us_per_job']:,} µs",
        f"{row['redis_us_per_job']:,} µs",
        *(f"{row[key]} ms" if key in row else "" for key in ("call_p50_ms", "call_p99_ms")),
    )
