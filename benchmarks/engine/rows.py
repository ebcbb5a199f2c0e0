"""From samples to the rows of a table."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engine.sample import Sample
from benchmarks.engine.systems import NAIVE
from benchmarks.rows import median_and_spread, print_table, show_spread

#: What counts as a loop that anyone could write.
LOOP = "loop: "

#: The kernel counts the processor time of other processes in ticks of so many seconds: what took
#: less may have taken 0.
TICK_S = 0.01

HEADS = (
    "",
    "texts/s",
    "spread",
    "of best loop (by CPU)",
    "of arrival order (CPU)",
    "padding",
    "tokens/s",
    "CPU per text",
)


def rows_of(
    workload: str, samples: Mapping[str, Sequence[Sample]], texts: int, flops: float
) -> list[dict[str, Any]]:
    """One row per system, of one workload.

    Args:
        workload: Its name.
        samples: Of each system, one per round; the rounds belong together.
        texts: In a round.
        flops: Of a forward pass over all of them, unpadded.

    Returns:
        Medians and spreads. Ratios are taken within each round, so that a machine that slows down
        does not count: of rates, and, for machines that others use, of texts per processor second.
        The best loop is the one with the best median, of time or of processor time.
    """
    seconds = {name: [each.seconds for each in taken] for name, taken in samples.items()}
    used = {name: [sum(each.cpu_s.values()) for each in taken] for name, taken in samples.items()}
    loops = [name for name in seconds if name.startswith(LOOP)]
    best = min(loops, key=lambda name: statistics.median(seconds[name]), default=None)
    # Where others use the machine, the quickest loop need not be the one that uses least of it.
    least = min(loops, key=lambda name: statistics.median(used[name]), default=None)
    tokens = max(each.tokens for taken in samples.values() for each in taken)
    rows = []
    for name, taken in samples.items():
        rates = [texts / each.seconds for each in taken]
        row: dict[str, Any] = {
            "system": name,
            "workload": workload,
            **median_and_spread("texts_per_s", rates),
            "padding_waste": _waste(taken[-1]),
            "tokens_per_s": round(statistics.median(rates) * tokens / texts),
            "flops_per_s": round(statistics.median(rates) * flops / texts),
            "cpu_ms_per_text": _ms_per_text([each.cpu_s for each in taken], texts),
            "stages_ms_per_text": _ms_per_text([each.stages_s for each in taken], texts),
        }
        for key, quick, thrifty in (
            ("of_best_loop", best, least),
            ("of_naive_loop", NAIVE, NAIVE),
        ):
            if quick in seconds and thrifty in used:
                row[key] = _ratio(seconds[quick], seconds[name])
                row[f"cpu_{key}"] = _ratio(used[thrifty], used[name])
        rows.append(row)
    return rows


def _ratio(others: Sequence[float], own: Sequence[float]) -> float:
    pairs = zip(others, own, strict=True)
    ratios = [max(other, TICK_S) / max(mine, TICK_S) for other, mine in pairs]
    return round(statistics.median(ratios), 3)


def _waste(sample: Sample) -> float | None:
    if not sample.computed_tokens:
        return None
    return round(1 - sample.tokens / sample.computed_tokens, 3)


def _ms_per_text(taken_s: Sequence[Mapping[str, float]], texts: int) -> dict[str, float]:
    return {
        name: round(statistics.median(each[name] for each in taken_s) / texts * 1e3, 3)
        for name in taken_s[0]
    }


def _with_cpu(row: Mapping[str, Any], key: str) -> str:
    return f"{row[key]:.2f} ({row[f'cpu_{key}']:.2f})" if key in row else ""


def print_rows(workload: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows of one workload."""
    made = [
        (
            row["system"],
            f"{row['texts_per_s']:,}",
            show_spread(row),
            *(_with_cpu(row, key) for key in ("of_best_loop", "of_naive_loop")),
            "" if row["padding_waste"] is None else f"{row['padding_waste']:.1%}",
            f"{row['tokens_per_s']:,}",
            f"{sum(row['cpu_ms_per_text'].values()):.2f} ms",
        )
        for row in rows
    ]
    print_table(HEADS, made, workload)
