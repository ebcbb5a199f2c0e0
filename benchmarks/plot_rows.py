"""Draws the rows of a benchmark as bars; runs in an environment that has matplotlib."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

#: What rows are drawn by -> how the axis is called, and its scale.
RATES = {
    "jobs_per_s": ("no-op jobs/s, logarithmic", "log"),
    "texts_per_s": ("texts/s", "linear"),
}

#: Rows that are drawn as ours.
OURS = ("batchery", "device", "onnx", "whole system")


def main(target: Path) -> None:
    """Reads JSON, writes the picture; the same JSON gives the same bytes."""
    report = json.load(sys.stdin)
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        panels.setdefault(row.get("workload", ""), []).append(row)
    # Text stays text: smaller, and to be searched.
    mpl.rcParams.update({"svg.hashsalt": "batchery", "svg.fonttype": "none"})
    heights = [0.4 * len(rows) + 1.2 for rows in panels.values()]
    figure, columns = pyplot.subplots(
        len(panels),
        figsize=(9, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained" if len(panels) > 1 else None,
    )
    for axes, (title, rows) in zip(columns.flat, panels.items(), strict=True):
        draw(axes, title, rows, report["hardware"])
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


def draw(
    axes: Any, title: str, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]
) -> None:
    """Draws one panel: bars with their spread, the fastest on top."""
    rate = next(key for key in RATES if key in rows[0])
    label, scale = RATES[rate]
    rows = sorted(rows, key=lambda each: each[rate])
    rates = [each[rate] for each in rows]
    errors = [
        [each[rate] - each["spread"][0] for each in rows],
        [each["spread"][1] - each[rate] for each in rows],
    ]
    colours = ["#c2410c" if each["system"].startswith(OURS) else "#64748b" for each in rows]
    bars = axes.barh([each["system"] for each in rows], rates, xerr=errors, color=colours)
    axes.bar_label(bars, [f"{rate:,}" for rate in rates], padding=6)
    axes.set_xscale(scale)
    if scale == "log":
        axes.set_xlim(min(rates) / 2, max(rates) * 3)
    axes.set_title(title)
    axes.set_xlabel(
        f"{label}; {machine.get('gpu') or machine['machine']}, {machine['cores']} cores"
    )
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
