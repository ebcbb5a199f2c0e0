"""What the queue benchmarks report: one row per system, as a table and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Sample

#: Columns of the table, also where the output is no terminal.
WIDTH = 130

HEADS = ("", "jobs/s", "spread", "of stock's best", "worker CPU", "Redis CPU", "call p50", "p99")


def report(
    samples: Mapping[str, Sequence[Sample]], target: Path | None, **options: Any
) -> dict[str, Any]:
    """Prints a table of all rows, ready for a page of docs.

    Args:
        samples: Of each row, by its name.
        target: Written as JSON, too, where not None.
        options: How they were measured.

    Returns:
        What is in the JSON.
    """
    info = {
        "hardware": hardware(),
        **options,
        "rows": [row(name, each) for name, each in samples.items()],
    }
    console = Console(highlight=False, width=WIDTH)
    console.print(info["hardware"])
    console.print(table(info["rows"]))
    write_report(target, info)
    return info


def row(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and spread of one system; percentiles of all its single calls."""
    rates = [sample.jobs_per_s for sample in samples]
    calls = sorted(call for sample in samples for call in sample.latencies_s)
    info: dict[str, Any] = {
        "system": name,
        "jobs_per_s": round(statistics.median(rates)),
        "spread": [round(min(rates)), round(max(rates))],
        "worker_us_per_job": round(statistics.median(sample.worker_us for sample in samples)),
        "redis_us_per_job": round(statistics.median(sample.redis_us for sample in samples)),
    }
    if calls:
        info["call_p50_ms"] = round(calls[len(calls) // 2] * 1000, 2)
        info["call_p99_ms"] = round(calls[len(calls) * 99 // 100] * 1000, 2)
    return info


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows, each beside its ratio to the best stock pool."""
    best = best_of_stock(rows)
    made = Table(*HEADS, box=box.MARKDOWN)
    for each in rows:
        made.add_row(
            each["system"],
            f"{each['jobs_per_s']:,}",
            f"{each['spread'][0]:,} to {each['spread'][1]:,}",
            f"{each['jobs_per_s'] / best:.2f}" if best else "",
            f"{each['worker_us_per_job']:,} µs",
            f"{each['redis_us_per_job']:,} µs",
            *(f"{each[key]} ms" if key in each else "" for key in ("call_p50_ms", "call_p99_ms")),
        )
    return made


def best_of_stock(rows: Sequence[dict[str, Any]]) -> int:
    """Jobs/s of the best stock pool without events; 0 where none was run."""
    names = ("celery solo", "celery threads -c 4", "celery prefork -c 2")
    return max((each["jobs_per_s"] for each in rows if each["system"] in names), default=0)
