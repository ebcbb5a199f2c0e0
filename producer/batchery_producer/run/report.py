"""The report of a run: one HTML page with its figures and plots, which needs no network."""

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
from batchery_producer.files.extras import extra
from batchery_producer.files.source import STANDARD_STREAM
from batchery_producer.run.output import check_name, check_place, is_same
from batchery_producer.run.summary import Summary, duration

#: Buckets of a histogram for each doubling: a percentile is off by less than a tenth.
PER_DOUBLING = 8

#: The bucket of zero is below all others.
ZERO = -(1 << 20)

#: Most buckets of a timeline; they get twice as wide when there are more.
MOST_BUCKETS = 240

#: First width of a timeline's buckets, in seconds.
FIRST_WIDTH_S = 0.25

#: Kinds of failures that are told apart, and characters that are kept of a message.
MOST_KINDS = 50

MOST_CHARACTERS = 500

#: What the others are called.
OTHER_KINDS = "other kinds"

#: Most bars of a distribution.
MOST_BARS = 48

COLOUR = "#c2410c"

SIZE_INCHES = (11, 6.5)

#: What matplotlib would say of itself.
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}

#: What its name must end with: so it never takes the place of data.
SUFFIX = ".html"

TEMPLATE = "report.html"


class Histogram:
    """How numbers from 0 up are distributed: counts by size class, of equal ratio."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums: dict[int, float] = {}
        self.count = 0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float) -> None:
        """Counts one."""
        key = math.floor(math.log2(value) * PER_DOUBLING) if value > 0 else ZERO
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sums[key] = self._sums.get(key, 0.0) + value
        self.count += 1
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    @property
    def mean(self) -> float:
        """Exact; 0 if there is nothing."""
        return sum(self._sums.values()) / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """A number that so many of a hundred do not exceed, nearly; 0 if there is nothing."""
        left = self.count * percent / 100
        for key, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return self._sums[key] / count
        return self.most

    def bars(self, most: int) -> Iterator[tuple[float, float, int]]:
        """From, to and count of each bar, at most so many; those without any are left out."""
        above = sorted(key for key in self._counts if key > ZERO)
        wide = 1
        while above and above[-1] // wide - above[0] // wide >= most:
            wide *= 2
        merged: dict[int, int] = {}
        for key in above:
            merged[key // wide] = merged.get(key // wide, 0) + self._counts[key]
        for key, count in merged.items():
            yield 2 ** (key * wide / PER_DOUBLING), 2 ** ((key + 1) * wide / PER_DOUBLING), count


class Timeline:
    """Counts over time, in buckets that get wider as it goes on."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.counts: list[int] = []

    def add(self, at_s: float) -> None:
        """Counts one.

        Args:
            at_s: Since the start, in seconds.
        """
        while at_s >= self.width_s * MOST_BUCKETS:
            self.width_s *= 2
            pairs = zip(self.counts[::2], [*self.counts[1::2], 0], strict=False)
            self.counts = [sum(pair) for pair in pairs]
        bucket = int(at_s / self.width_s)
        self.counts += [0] * (bucket + 1 - len(self.counts))
        self.counts[bucket] += 1


@dataclass(slots=True)
class Kind:
    """Failures of one kind.

    Attributes:
        name: Of the error's type.
        count: How many there were.
        place: Of the first.
        message: Of the first.
    """

    name: str
    count: int
    place: str
    message: str


class Figures:
    """What happened in a run; times are seconds since its start."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}
        self._kinds: dict[str, Kind] = {}
        #: Rows that were finished, either way.
        self.done = Timeline()
        #: From the moment a job is sent to that at which its result is here, in seconds.
        self.latency = Histogram()
        #: Characters of each item that is a text.
        self.lengths = Histogram()
        #: For each job, items in the batch that it was computed in.
        self.batch_sizes = Histogram()

    def read(self, items: Iterable[Any]) -> None:
        """Notes what is about to be sent, or awaited."""
        for item in items:
            if isinstance(item, str):
                self.lengths.add(len(item))

    def sent(self, at_s: float, task_ids: Sequence[str]) -> None:
        """Notes jobs that are sent; no more than the window has are held."""
        self._sent_s.update(dict.fromkeys(task_ids, at_s))

    def ended(self, at_s: float, task_id: str, batch_size: int) -> None:
        """Notes a job that has ended.

        Args:
            at_s: When.
            task_id: Its own.
            batch_size: How many items shared its batch; 0 if nobody knows.
        """
        sent_s = self._sent_s.pop(task_id, None)
        if sent_s is not None:
            self.latency.add(at_s - sent_s)
        if batch_size:
            self.batch_sizes.add(batch_size)

    def succeeded(self, at_s: float) -> None:
        """Notes a row that has its result."""
        self.done.add(at_s)

    def failed(self, at_s: float, place: str, kind: str, message: str) -> None:
        """Notes a row that has failed, and why."""
        self.done.add(at_s)
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            kind = OTHER_KINDS
        known = self._kinds.setdefault(kind, Kind(kind, 0, place, message[:MOST_CHARACTERS]))
        known.count += 1

    @property
    def kinds(self) -> Sequence[Kind]:
        """The failures by kind, the most frequent first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)


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


class Report:
    """Is written when the run has ended, however it did."""

    def __init__(self, path: str | Path, source: Dataset, *others: str | Path | None) -> None:
        """Makes sure that it can be written.

        Args:
            path: Where it goes; a report that is there is replaced.
            source: Of the run.
            others: Files that the run writes; the first is its output.

        Raises:
            DatasetError: It cannot be written there, or what draws it is not installed.
        """
        self.path = Path(path)
        self.figures = Figures()
        self._source = source.name
        self._output = "" if str(others[0]) == STANDARD_STREAM else str(others[0])
        self._began = datetime.now(UTC)
        if self.path.suffix.lower() != SUFFIX:
            raise DatasetError(f"{self.path}: a report is a page; name it report{SUFFIX}")
        check_name(self.path)
        check_place(self.path, source, replace=True, hint="")
        if any(is_same(self.path, Path(each)) for each in others if each is not None):
            raise DatasetError(f"{self.path}: the report needs a file of its own")
        self._new = self.path.with_name(f"{self.path.name}.new")
        self._store("")
        self._new.unlink()
        for library in ("jinja2", "matplotlib.figure"):
            extra(library)

    def write(self, task: str, summary: Summary) -> None:
        """Writes it, whole or not at all.

        Raises:
            DatasetError: It cannot be written. The output of the run is not affected.
        """
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
        yield "rows in all", f"{done + summary.before:,}"
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
            numbers = [each.least, each.mean, *percentiles, each.most]
            yield name, f"{each.count:,}", [_number(number) for number in numbers]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
