"""A dry run: checks everything and tries some rows, but writes nothing."""

import itertools
import secrets
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from batchery_producer.files.dataset import Dataset, begin_reading
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Record
from batchery_producer.run.api import start_run
from batchery_producer.run.loop import FileRun
from batchery_producer.run.options import SubmitOptions
from batchery_producer.run.output import Output
from batchery_producer.run.report import Report
from batchery_producer.run.summary import Ending, Summary, duration

#: Number of jobs in the probe, and its maximum duration in seconds.
PROBE_JOBS = 512
PROBE_S = 15.0

#: Maximum number of broken rows that are shown.
MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DryRun:
    """Findings of a dry run.

    Attributes:
        description: How rows are read.
        rows: Number of rows that can become jobs.
        broken: Number of rows that cannot.
        shown: The first broken rows, each with file, line and reason.
        probe: Summary of the probe; None if there were no rows to try.
        left_s: Estimated duration for all rows, in seconds; None if the probe had no result.
    """

    description: str
    rows: int
    broken: int
    shown: Sequence[str]
    probe: Summary | None
    left_s: float | None

    @property
    def ending(self) -> Ending:
        """How the run would probably end."""
        if self.probe is not None and self.left_s is None:
            return Ending.GAVE_UP
        failed = self.broken or (self.probe is not None and self.probe.failed)
        return Ending.SOME_FAILED if failed else Ending.SUCCEEDED


def try_file(
    source: str | Path | Sequence[str | Path],
    task: str | None,
    output: str | Path,
    *,
    app: Celery,
    options: SubmitOptions,
) -> DryRun:
    """Checks input, output, app, task and workers; reads all rows, and submits the first ones.

    It takes the arguments of `submit_file`, and ignores options without effect on a dry run.

    Raises:
        BatcheryError: As `submit_file` does.
    """
    dataset, end_s = Dataset(source, **options.reading), float("inf")
    Output(dataset, output, **options.writing)
    if options.report:
        Report(options.report, dataset, output, options.errors)
    stop = options.stop
    probe_options = SubmitOptions(
        window=min(options.window, PROBE_JOBS),
        queue=options.queue,
        keywords=options.keywords,
        stop=lambda: stop() or time.monotonic() > end_s,
    )
    run = start_run(app, dataset, task, probe_options)
    all_rows = begin_reading(dataset, stop) or ()
    first, rows, shown = _read(itertools.takewhile(lambda _: not stop(), all_rows), dataset)
    end_s = time.monotonic() + PROBE_S
    probe = _probe(run, dataset, first) if first else None
    left_s = rows[0] / probe.rate if probe and probe.rate else None
    return DryRun(dataset.description, *rows, shown, probe, left_s)


def _read(
    rows: Iterable[Record | Broken], dataset: Dataset
) -> tuple[list[Record], tuple[int, int], list[str]]:
    """The first records, the numbers of good and broken rows, and the first reasons."""
    first: list[Record] = []
    shown: list[str] = []
    good = broken = 0
    for row in rows:
        if isinstance(row, Record):
            good += 1
            if len(first) < PROBE_JOBS:
                first.append(row)
        else:
            broken += 1
            if len(shown) < MAX_SHOWN:
                shown.append(f"{dataset.line_name(row.source, row.line)}: {row.reason}")
    return first, (good, broken), shown


def _probe(run: FileRun, dataset: Dataset, rows: Sequence[Record]) -> Summary:
    names = [each.name for each in dataset.sources]
    journal = Journal(secrets.token_hex(8), run.task, {}, names, [], len(rows))
    with (
        tempfile.TemporaryDirectory(prefix="batchery-") as folder,
        Output(dataset, Path(folder, "probe.jsonl")) as files,
    ):
        files.open(journal)
        return run.run(rows, files, journal)


def describe_dry_run(run: DryRun, name: str) -> str:
    """Findings of a dry run, as text."""
    lines = [run.description, f"{name}: {run.rows:,} rows can be sent, {run.broken:,} cannot"]
    lines += [f"  {each}" for each in run.shown]
    if run.broken > len(run.shown):
        lines.append(f"  and {run.broken - len(run.shown):,} more")
    if run.probe is not None and run.left_s is not None:
        done = run.probe.succeeded + run.probe.failed
        lines.append(
            f"probe: {done:,} jobs in {run.probe.seconds:.1f} s, {run.probe.failed:,} of them"
            f" failed; all rows would take about {duration(run.left_s)}"
        )
    elif run.probe is not None:
        lines.append(f"probe: no result within {run.probe.seconds:.0f} s; is there a worker?")
    return "\n".join(lines)
