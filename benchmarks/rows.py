"""What the tables of all benchmarks share: which rows, in which order, and the figures of each."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

Row = TypeVar("Row")

PERCENTS = (50, 95, 99)

#: Columns of what is printed, also where the output is no terminal.
WIDTH = 150


def choose(rows: Sequence[tuple[str, Row]], names: Sequence[str] | None) -> list[Row]:
    """The rows of these names, or whose names begin with one of these; all if there are none.

    Raises:
        SystemExit: There is no such row.
    """
    every = [name for name, _ in rows]
    begins = tuple(name for name in names or () if name not in every)
    found = [row for name, row in rows if not names or name in names or name.startswith(begins)]
    if not found:
        raise SystemExit(f"--systems: choose from {', '.join(every)}")
    return found


def in_turn(rows: Sequence[Row], rounds: int) -> Iterator[tuple[int, Row]]:
    """Every row once a round, with the number of the round.

    To and fro, so that a machine that slows down slows all of them.
    """
    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            yield number, row


def median_and_spread(name: str, values: Sequence[float], digits: int | None = 1) -> dict[str, Any]:
    """The median of the rounds under a name, and the least and the greatest of them."""
    spread = [round(min(values), digits), round(max(values), digits)]
    return {name: round(statistics.median(values), digits), "spread": spread}


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile; 0 where there are no values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def percentiles_ms(values_ms: Sequence[float]) -> dict[str, float]:
    """Percentiles of a row, in ms."""
    return {f"p{each}_ms": round(percentile(values_ms, each), 2) for each in PERCENTS}


def show_spread(row: Mapping[str, Any]) -> str:
    """The least and the greatest of the rounds."""
    low, high = row["spread"]
    return f"{low:,} to {high:,}"


def print_table(heads: Iterable[str], rows: Iterable[Iterable[str]], title: str = "") -> None:
    """Prints a table, ready for a page of docs."""
    table = Table(*heads, box=box.MARKDOWN, title=title or None)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=WIDTH).print(table)


def print_verdicts(verdicts: Iterable[Mapping[str, Any]]) -> None:
    """Prints what is claimed, whether it holds, and what was found."""
    for each in verdicts:
        print(f"{'yes' if each['holds'] else 'NO'}: {each['claim']}: {each['found']}")
