"""Draws the rows of a queue benchmark as bars; runs in an environment that has matplotlib."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot


def main(target: Path) -> None:
    """Reads JSON, writes the picture; the same JSON gives the same bytes."""
    report = json.load(sys.stdin)
    rows: list[dict[str, Any]] = sorted(report["rows"], key=lambda each: each["jobs_per_s"])
    rates = [each["jobs_per_s"] for each in rows]
    errors = [
        [each["jobs_per_s"] - each["spread"][0] for each in rows],
        [each["spread"][1] - each["jobs_per_s"] for each in rows],
    ]
    # Text stays text: smaller, and to be searched.
    mpl.rcParams.update({"svg.hashsalt": "batchery", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(rows) + 1.2))
    colours = ["#c2410c" if each["system"].startswith("batchery") else "#64748b" for each in rows]
    bars = axes.barh([each["system"] for each in rows], rates, xerr=errors, color=colours)
    axes.bar_label(bars, [f"{rate:,}" for rate in rates], padding=6)
    axes.set_xscale("log")
    axes.set_xlim(min(rates) / 2, max(rates) * 3)
    machine = report["hardware"]
    axes.set_xlabel(f"no-op jobs/s, logarithmic; {machine['machine']}, {machine['cores']} cores")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
