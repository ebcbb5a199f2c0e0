"""The report of a run: one HTML page with figures and plots, which needs no network."""

import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.source import STANDARD_STREAM, extra
from batchery_producer.run.options import Summary, duration
from batchery_producer.run.output import check_output_path, check_path, is_same

#: Buckets of a histogram for each doubling; percentiles are then exact to a tenth.
PER_DOUBLING = 8

#: Bucket of zero, below all others.
ZERO = -(1 << 20)

#: Maximum number of a timeline's buckets; their width doubles when it is reached.
MAX_BUCKETS = 240

#: Initial width of a timeline's buckets, in seconds.
FIRST_WIDTH_S = 0.25

#: Maximum number of kinds of failures that are counted apart.
MAX_KINDS = 50

#: Maximum length of a failure's message, in characters.
MAX_CHARACTERS = 500

#: Name of all other kinds.
OTHER_KINDS = "other kinds"

#: Maximum number of bars in a distribution.
MAX_BARS = 48

COLOUR = "#c2410c"

SIZE_INCHES = (11, 6.5)

#: Metadata that matplotlib would add.
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}

#: Required extension, so that a report never replaces data.
SUFFIX = ".html"

TEMPLATE = "report.html"


class Histogram:
    """Distribution of numbers from 0 up, in buckets of equal ratio."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums: dict[int, float] = {}
        self.count = 0
        self.minimum = math.inf
        self.maximum = 0.0

    def add(self, value: float) -> None:
        """Counts one."""
        key = math.floor(math.log2(value) * PER_DOUBLING) if value > 0 else ZERO
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sums[key] = self._sums.get(key, 0.0) + value
        self.count += 1
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)

    @property
    def mean(self) -> float:
        """Exact mean; 0 without numbers."""
        return sum(self._sums.values()) / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Approximate percentile; 0 without numbers."""
        left = self.count * percent / 100
        for key, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return self._sums[key] / count
        return self.maximum

    def bars(self, maximum: int) -> Iterator[tuple[float, float, int]]:
        """Start, end and count of each bar that is not empty, up to a maximum number of bars."""
        above = sorted(key for key in self._counts if key > ZERO)
        wide = 1
        while above and above[-1] // wide - above[0] // wide >= maximum:
            wide *= 2
        merged: dict[int, int] = {}
        for key in above:
            merged[key // wide] = merged.get(key // wide, 0) + self._counts[key]
        for key, count in merged.items():
            yield 2 ** (key * wide / PER_DOUBLING), 2 ** ((key + 1) * wide / PER_DOUBLING), count


class Timeline:
    """Counts over time, in buckets whose width doubles when there are too many."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.counts: list[int] = []

    def add(self, at_s: float) -> None:
        """Counts one, at a time since the start."""
        while at_s >= self.width_s * MAX_BUCKETS:
            self.width_s *= 2
            pairs = zip(self.counts[::2], [*self.counts[1::2], 0], strict=False)
            self.counts = [sum(pair) for pair in pairs]
        bucket = int(at_s / self.width_s)
        self.counts += [0] * (bucket + 1 - len(self.counts))
        self.counts[bucket] += 1


@dataclass(slots=True)
class FailureKind:
    """Failures of one kind.

    Attributes:
        name: Name of the error's type.
        count: Number of failures.
        line_name: Line of the first failure.
        message: Message of the first failure.
    """

    name: str
    count: int
    line_name: str
    message: str


class Figures:
    """Figures of a run; times are in seconds since its start."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}
        self._kinds: dict[str, FailureKind] = {}
        #: Rows that succeeded or failed.
        self.done = Timeline()
        #: Time from sending a job to taking its result, in seconds.
        self.latency = Histogram()
        #: Characters of each item that is a text.
        self.lengths = Histogram()
        #: Size of each job's batch, in items.
        self.batch_sizes = Histogram()

    def read(self, items: Iterable[Any]) -> None:
        """Notes items whose job will be sent or awaited."""
        for item in items:
            if isinstance(item, str):
                self.lengths.add(len(item))

    def sent(self, at_s: float, task_ids: Sequence[str]) -> None:
        """Notes jobs that are sent; it holds no more of them than the window."""
        self._sent_s.update(dict.fromkeys(task_ids, at_s))

    def ended(self, at_s: float, task_id: str, batch_size: int) -> None:
        """Notes a job that has ended; the size of its batch is 0 if it is unknown."""
        sent_s = self._sent_s.pop(task_id, None)
        if sent_s is not None:
            self.latency.add(at_s - sent_s)
        if batch_size:
            self.batch_sizes.add(batch_size)

    def succeeded(self, at_s: float) -> None:
        """Notes a row that succeeded."""
        self.done.add(at_s)

    def failed(self, at_s: float, line_name: str, kind: str, message: str) -> None:
        """Notes a row that failed."""
        self.done.add(at_s)
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = OTHER_KINDS
        known = self._kinds.setdefault(
            kind, FailureKind(kind, 0, line_name, message[:MAX_CHARACTERS])
        )
        known.count += 1

    @property
    def kinds(self) -> Sequence[FailureKind]:
        """The failures by kind, the most frequent first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)


def draw(figures: Figures, seconds: float) -> str:
    """Draws the rate over a run of so many seconds, and distributions of its other figures.

    Returns:
        An `svg` element without external references, whose text is text.
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
    # Only a file needs what comes before the element.
    return re.sub(r"\A.*?(?=<svg)", "", text.getvalue(), count=1, flags=re.DOTALL)


def _draw_rate(axes: Any, figures: Figures, seconds: float) -> None:
    counts, width_s = figures.done.counts, figures.done.width_s
    edges = [number * width_s for number in range(len(counts))]
    # The last bucket may be incomplete, so its rate covers only the elapsed part.
    edges.append(min(max(seconds, edges[-1] + width_s / 10), edges[-1] + width_s) if edges else 0)
    widths = [right - left for left, right in pairwise(edges)]
    rates = [count / width for count, width in zip(counts, widths, strict=True)]
    _frame(axes, "rows finished per second", "s since the start", "rows/s")
    if rates:
        axes.stairs(rates, edges, fill=True, color=COLOUR)


def _draw_bars(axes: Any, histogram: Histogram, title: str, things: str, unit: str) -> None:
    _frame(axes, title, f"{unit}, logarithmic", things)
    bars = list(histogram.bars(MAX_BARS))
    if not bars:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)
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


class Report:
    """An HTML page, written when the run has ended in any way."""

    def __init__(self, path: str | Path, source: Dataset, *others: str | Path | None) -> None:
        """Checks that the page can be written.

        Args:
            path: Path of the page; an older page is replaced.
            source: Input of the run.
            others: Files that the run writes; the first is its output.

        Raises:
            DatasetError: The page cannot be written, or a library is not installed.
        """
        self.path = Path(path)
        self.figures = Figures()
        self._source = source.name
        self._output = "" if str(others[0]) == STANDARD_STREAM else str(others[0])
        self._began = datetime.now(UTC)
        if self.path.suffix.lower() != SUFFIX:
            raise DatasetError(f"{self.path}: a report is a page; name it report{SUFFIX}")
        check_path(self.path)
        check_output_path(self.path, source, replace=True, hint="")
        if any(is_same(self.path, Path(each)) for each in others if each is not None):
            raise DatasetError(f"{self.path}: the report needs a file of its own")
        self._new = self.path.with_name(f"{self.path.name}.new")
        self._store("")
        self._new.unlink()
        for library in ("jinja2", "matplotlib.figure"):
            extra(library)

    def write(self, task: str, summary: Summary) -> None:
        """Writes the page, whole or not at all."""
        jinja2 = extra("jinja2")
        loader = jinja2.PackageLoader(__package__, "")
        page = jinja2.Environment(loader=loader, autoescape=True).get_template(TEMPLATE)
        self._store(
            page.render(
                task=task,
                source=self._source,
                output=self._output,
                began=self._began.isoformat(" ", "seconds"),
                summary=summary,
                rows=list(_rows(summary)),
                picture=draw(self.figures, summary.seconds),
                distributions=list(_distributions(self.figures)),
                kinds=self.figures.kinds,
            )
        )
        os.replace(self._new, self.path)

    def _store(self, text: str) -> None:
        try:
            self._new.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            with suppress(OSError):
                self._new.unlink()
            raise DatasetError(
                f"{self.path}: the report cannot be written: {error.strerror}"
            ) from None


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    done = summary.succeeded + summary.failed
    yield "ended", summary.ending.name.lower().replace("_", " ")
    yield "rows with a result", f"{summary.succeeded:,}"
    yield "rows that failed", f"{summary.failed:,}"
    if summary.before:
        yield "rows that were done before", f"{summary.before:,}"
        yield "rows in total", f"{done + summary.before:,}"
    yield "jobs sent", f"{summary.submitted:,}"
    if summary.in_flight:
        yield "jobs still in flight", f"{summary.in_flight:,}"
    yield "time", duration(summary.seconds)
    yield "rows per second", f"{summary.rate:,.1f}"


def _distributions(figures: Figures) -> Iterator[tuple[str, str, Sequence[str]]]:
    histograms: Iterable[tuple[str, Histogram]] = (
        ("seconds from sending to result", figures.latency),
        ("characters of a text", figures.lengths),
        ("items in the batch of a job", figures.batch_sizes),
    )
    for name, each in histograms:
        if each.count:
            percentiles = [each.percentile(percent) for percent in (50, 90, 99)]
            numbers = [each.minimum, each.mean, *percentiles, each.maximum]
            yield name, f"{each.count:,}", [_number(number) for number in numbers]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
