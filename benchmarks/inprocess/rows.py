"""From runs to the rows of a table: medians over the rounds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

#: Figures of a row, each the median of its rounds, and how many digits are kept.
DIGITS = {"items_per_s": 1, "p50_ms": 4, "p99_ms": 4, "cpu_us_per_item": 1, "mean_in_flight": 1}

HEADS = ("", "callers", "items/s", "spread", "p50", "p99", "CPU per item", "over function", "wrong")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """What a row is about, besides its system."""

    workload: str
    mode: str
    callers: int


def row_of(
    system: str, place: Place, runs: Sequence[Mapping[str, Any]], *, compares: bool
) -> dict[str, Any]:
    """One row.

    Args:
        system: Its name.
        place: What was run.
        runs: One per round.
        compares: Whether the system calls the function, and has no model of its own.
    """
    row: dict[str, Any] = {
        "system": system,
        "workload": place.workload,
        "mode": place.mode,
        "callers": place.callers,
        "wrong": sum(run["wrong"] for run in runs),
        "error": next((run["error"] for run in runs if run["error"]), ""),
        "rounds": [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in pairs}
            for pairs in (run.items() for run in runs)
        ],
    }
    answered = [run for run in runs if run["items"]]
    if not answered:
        return row
    for key, digits in DIGITS.items():
        row[key] = round(statistics.median(run[key] for run in answered), digits)
    rates = [run["items_per_s"] for run in answered]
    row["spread"] = [round(min(rates), 1), round(max(rates), 1)]
    if compares and "overhead_ms" in answered[0]:
        over = statistics.median(run["overhead_ms"] for run in answered)
        row["overhead_us"] = round(over * 1e3, 1)
    return row


def print_rows(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a table for each workload and mode, ready for a page of docs."""
    tables: dict[tuple[str, str], Table] = {}
    for row in rows:
        key = row["workload"], row["mode"]
        if key not in tables:
            tables[key] = Table(*HEADS, box=box.MARKDOWN, title=", ".join(key))
        tables[key].add_row(*_cells(row))
    for table in tables.values():
        console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    wrong = f"{row['wrong']:,}: WRONG" if row["wrong"] else "0"
    if "items_per_s" not in row:
        return [row["system"], f"{row['callers']:,}", *[""] * 6, wrong]
    return [
        row["system"],
        f"{row['callers']:,}",
        f"{row['items_per_s']:,}",
        f"{row['spread'][0]:,} to {row['spread'][1]:,}",
        f"{row['p50_ms']:,.3f} ms",
        f"{row['p99_ms']:,.3f} ms",
        f"{row['cpu_us_per_item']:,} µs",
        f"{row['overhead_us']:,} µs" if "overhead_us" in row else "",
        wrong,
    ]


def print_idle(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what the systems do while nobody calls."""
    table = Table("", "CPU per second", "wake-ups per second", box=box.MARKDOWN, title="idle")
    for row in rows:
        table.add_row(row["system"], f"{row['cpu_ms_per_s']} ms", f"{row['wakeups_per_s']:,}")
    console.print(table)
