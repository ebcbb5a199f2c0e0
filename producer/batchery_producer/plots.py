"""Plots of a run's figures, as one SVG with four panels."""

import io
import re
from itertools import pairwise
from typing import Any

from batchery_producer.extras import extra
from batchery_producer.figures import Figures, Histogram

#: Most bars of a distribution.
MOST_BARS = 48

COLOUR = "#c2410c"
SIZE_INCHES = (11, 6.5)

#: What matplotlib would say of itself.
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def draw(figures: Figures, seconds: float) -> str:
    """Draws the rate over time, and how latencies, lengths and batch sizes are distributed.

    Args:
        figures: Of a run.
        seconds: How long it took.

    Returns:
        An `svg` element that refers to nothing outside; its text is text.

    Raises:
        DatasetError: matplotlib is not installed.
    """
    matplotlib: Any = extra("matplotlib")
    figure_class: Any = extra("matplotlib.figure").Figure
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "batchery"}):
        picture = figure_class(figsize=SIZE_INCHES, layout="constrained")
        rate, latency, lengths, batches = picture.subplots(2, 2).flat
        _draw_rate(rate, figures, seconds)
        _draw_bars(latency, figures.latency, "from sending to result", "jobs", "s")
        _draw_bars(lengths, figures.lengths, "length of texts", "texts", "characters")
        title = "size of the batch that a job was in"
        _draw_bars(batches, figures.batch_sizes, title, "jobs", "items")
        text = io.StringIO()
        picture.savefig(text, format="svg", metadata=NO_METADATA)
    # What comes before the element is for files.
    return re.sub(r"\A.*?(?=<svg)", "", text.getvalue(), count=1, flags=re.DOTALL)


def _draw_rate(axes: Any, figures: Figures, seconds: float) -> None:
    counts, width_s = figures.done.counts, figures.done.width_s
    edges = [number * width_s for number in range(len(counts))]
    # The last bucket may not be over: its rate is that of the part that is.
    edges.append(min(max(seconds, edges[-1] + width_s / 10), edges[-1] + width_s) if edges else 0)
    widths = [right - left for left, right in pairwise(edges)]
    rates = [count / width for count, width in zip(counts, widths, strict=True)]
    _frame(axes, "rows finished per second", "s since the start", "rows/s")
    if rates:
        axes.stairs(rates, edges, fill=True, color=COLOUR)


def _draw_bars(axes: Any, histogram: Histogram, title: str, things: str, unit: str) -> None:
    _frame(axes, title, f"{unit}, logarithmic", things)
    bars = list(histogram.bars(MOST_BARS))
    if not bars:
        axes.text(0.5, 0.5, "nothing is known", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    lefts, rights, counts = zip(*bars, strict=True)
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    axes.bar(lefts, counts, widths, align="edge", color=COLOUR)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(extra("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")


def _frame(axes: Any, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
