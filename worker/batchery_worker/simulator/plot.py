"""The picture of a comparison; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchery.errors import StartError
from batchery_worker.simulator.report import PERCENTILES, Figures

#: Colours of a policy that is ours, and of the others.
OURS, OTHERS = "#c2410c", "#64748b"

#: Height of the bar of one policy, and of all else, in inches.
ROW_INCHES, REST_INCHES = 0.45, 1.4


def draw_plot(target: Path, policies: Sequence[Figures], ours: str, target_ms: float) -> None:
    """Draws how late each policy is; the same figures give the same bytes.

    Args:
        target: Path of the picture; its suffix chooses the format.
        policies: Of `report.figures`.
        ours: Name of the policy in another colour.
        target_ms: Wanted latency, for a line.

    Raises:
        StartError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise StartError("--plot needs matplotlib: pip install matplotlib") from None
    rows = list(reversed(policies))
    # Text stays text: smaller, and to be searched.
    with mpl.rc_context({"svg.hashsalt": "batchery", "svg.fonttype": "none"}):
        figure: Any = Figure(
            figsize=(9, ROW_INCHES * len(rows) + REST_INCHES), layout="constrained"
        )
        latency, missed = figure.subplots(1, 2, sharey=True)
        _draw_latency(latency, rows, ours, target_ms)
        _draw_missed(missed, rows, ours)
        metadata = {"Date": None} if target.suffix == ".svg" else {}
        try:
            figure.savefig(target, metadata=metadata)
        except (OSError, ValueError) as error:
            raise StartError(f"{target}: cannot be drawn: {error}") from None


def _draw_latency(axes: Any, rows: Sequence[Figures], ours: str, target_ms: float) -> None:
    """A line for each policy, from the median to the last percentile."""
    for place, row in enumerate(rows):
        known = [row[f"p{each}_ms"] for each in PERCENTILES if row[f"p{each}_ms"] is not None]
        axes.plot(known, [place] * len(known), "o-", color=_colour(row, ours), linewidth=2)
    axes.axvline(target_ms, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["policy"] for row in rows])
    axes.set_xscale("log")
    named = ", ".join(f"p{each}" for each in PERCENTILES)
    axes.set_xlabel(f"latency in ms: {named}; target dashed")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_missed(axes: Any, rows: Sequence[Figures], ours: str) -> None:
    shares = [100 * (row["missed"] or 0.0) for row in rows]
    bars = axes.barh(range(len(rows)), shares, color=[_colour(row, ours) for row in rows])
    axes.bar_label(bars, [f"{each:.1f} %" for each in shares], padding=4)
    axes.set_xlim(0, max(1.0, *shares) * 1.2)
    axes.set_xlabel("jobs that missed the target, %")
    axes.spines[["top", "right"]].set_visible(False)


def _colour(row: Figures, ours: str) -> str:
    return OURS if row["policy"] == ours else OTHERS
