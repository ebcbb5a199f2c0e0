"""The report of a run: one HTML page with its figures and plots, which needs no network."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from batchery.errors import DatasetError
from batchery_producer.dataset import Dataset
from batchery_producer.extras import extra
from batchery_producer.figures import Figures, Histogram
from batchery_producer.places import check_name, check_place, is_same
from batchery_producer.plots import draw
from batchery_producer.progress import duration
from batchery_producer.source import STANDARD_STREAM
from batchery_producer.summary import Summary

#: What its name must end with: so it never takes the place of data.
SUFFIX = ".html"

TEMPLATE = "report.html"


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
