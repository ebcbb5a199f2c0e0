"""What all pictures look like: one title, plain axes, and colours for with and without a policy."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from batchery_worker.simulator.outcome import OTHERS, OURS
from benchmarks.scheduling.plots.runs import Figures

#: Colours with a policy, without it, and of a third line. They differ in lightness, too.
WITH, WITHOUT, THIRD = OURS, OTHERS, "#0369a1"

#: Colours of the classes, highest first: one hue, from dark to light.
CLASS_COLOURS = ("#c2410c", "#fb923c", "#fed7aa")

#: Colour of what is written, and of lines to compare with.
INK, FAINT = "#1e293b", "#94a3b8"

#: Of an area behind lines.
PALE = "#e2e8f0"

INCHES = (8.0, 3.1)

STYLE: Any = {
    # Text stays text: smaller, and to be searched.
    "svg.fonttype": "none",
    "svg.hashsalt": "batchery",
    "font.size": 11,
    "legend.frameon": False,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.2,
}


def save(target: Path, draw: Callable[[Any, Figures], str], found: Figures) -> None:
    """Draws a picture; the same figures give the same bytes.

    Args:
        target: Path of the picture; its suffix chooses the format.
        draw: Draws on a figure of matplotlib, and returns the title.
        found: What it draws. An SVG says it as JSON, too.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        title = draw(figure, found)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        info = {"Date": None, "Title": title, "Description": json.dumps(found)}
        figure.savefig(target, metadata=info if target.suffix == ".svg" else None)


def draw_bars(axes: Any, values: Sequence[float], labels: Sequence[str]) -> None:
    """Draws two bars, without and with a policy, which say their own values."""
    bars = axes.bar(["without", "with"], values, color=[WITHOUT, WITH], width=0.6)
    axes.bar_label(bars, labels, padding=2)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.margins(y=0.15)


def draw_times_in_ms(axes: Any, ticks_ms: Sequence[float]) -> None:
    """Makes the horizontal axis a logarithmic one of times, with plain numbers."""
    axes.set_xscale("log")
    names = [f"{ms / 1e3:g} s" if ms >= 1e3 else f"{ms:g} ms" for ms in ticks_ms]
    axes.set_xticks(ticks_ms, names)
    axes.minorticks_off()


def said_by(picture: Path) -> Figures:
    """The figures that an SVG of `save` was drawn from."""
    found = ElementTree.parse(picture).findtext(".//{http://purl.org/dc/elements/1.1/}description")
    assert found is not None
    figures: Figures = json.loads(found)
    return figures
