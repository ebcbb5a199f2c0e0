"""The bulk producer as a function: files in, a file out."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery import Celery

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Done, Journal
from batchery_producer.run.output import Output
from batchery_producer.run.report import Report
from batchery_producer.run.sender import Sending
from batchery_producer.run.summary import Ending, Snapshot, Summary

logger = logging.getLogger(__name__)

#: Jobs in flight: some batches for each of several devices, and still little memory.
WINDOW = 1024


def submit_file(
    source: str | Path | Sequence[str | Path],
    task: str | None,
    output: str | Path,
    *,
    app: Celery,
    queue: str | None = None,
    keywords: Mapping[str, Any] | None = None,
    errors: str | Path | None = None,
    ordered: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    stop_at_failure: bool = False,
    keep_results: bool = False,
    window: int = WINDOW,
    expires_s: float | None = None,
    timeout_s: float | None = None,
    report: str | Path | None = None,
    progress: Callable[[Snapshot], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    notice: Callable[[str], None] = logger.warning,
    **reading: Any,
) -> Summary:
    """Submits every row of a file as a job, and writes every result to another file.

    Memory does not grow with the input. Redis may restart in between; a job whose message Redis has
    lost never comes back, and `timeout_s` ends the wait for it. Jobs are sent at least once.

    Args:
        source: Files, patterns such as `data/*.jsonl`, or `-` for standard input: JSON lines, CSV,
            TSV or text; gzip and zstd are recognised.
        task: Name of the task; None for OpenAI's batch files, whose model names it.
        output: Gets one line per result, in the order of completion; `-` is standard output.
        app: Where the jobs are sent and the results are stored.
        queue: By default as the app routes the task; if the app does not know it, the task's name.
        keywords: Keyword arguments of every job.
        errors: Gets one line per failure; by default `<output>.errors.jsonl`.
        ordered: Write results in the order of the input, when all are there.
        overwrite: Replace an output that is there.
        resume: Finish an output that is there: only what is missing is submitted. Jobs that are
            still on their way are awaited, not sent again.
        stop_at_failure: End the run when a job has failed, or a line become no job.
        keep_results: Leave results in the backend, too, until they expire.
        window: Most jobs in flight.
        expires_s: Jobs not begun by then, in seconds, fail as revoked.
        timeout_s: Give up when no result has come for so long, in seconds.
        report: Gets figures and plots of the run when it has ended, as one HTML page.
        progress: Called several times a second, on this thread.
        stop: Asked several times a second; True ends the run. Jobs in flight stay where they are.
        notice: Gets lines for the user; one when nothing comes for a while.
        reading: What to read and how: `format`, `field`, `id_field`, `limit`, `sample` and
            `retry_failed`, as for `Dataset`.

    Returns:
        What was done, and how it ended.

    Raises:
        DatasetError: Input or output cannot be used, or the output cannot be written any more.
        RedisUnavailable: There is no Redis at the app's URL.
        StartError: There is no other broker, either.
        SettingsError: The app stores no results or does not allow the queue, or no worker has the
            task.
        ValueError: The window is less than 1.
    """
    dataset = Dataset(source, **reading)
    files = Output(dataset, output, errors, ordered=ordered, overwrite=overwrite, resume=resume)
    page = Report(report, dataset, output, errors) if report else None
    sending: dict[str, Any] = {"window": window, "queue": queue, "expires_s": expires_s}
    run: dict[str, Any] = {"progress": progress, "notice": notice, "timeout_s": timeout_s}
    run |= {"keep_results": keep_results, "stop_at_failure": stop_at_failure}
    run |= {"figures": page.figures if page else None}
    name = task_of(dataset, task)
    jobs = Sending(app, name, keywords=keywords, stop=stop, **sending)
    settings = {"kwargs": dict(keywords or {}), **dataset.settings, "ordered": ordered}
    with files:
        journal = files.open(Journal.of(dataset.sources, name, settings, window))
        total = lambda: _less(dataset.total, len(files.done))  # noqa: E731 (asked again and again)
        summary = jobs.run(files.missing(dataset), files, journal, total=total, **run)
    summary = _with_earlier(summary, files.done)
    if page:
        page.write(name, summary)
    return summary


def task_of(dataset: Dataset, task: str | None) -> str:
    """The task that is named, or else the model of OpenAI's requests.

    Raises:
        DatasetError: Neither says anything.
    """
    if task is not None:
        return task
    if dataset.model is None or not dataset.model.name:
        raise DatasetError(
            f"{dataset.name}: no task; name one with --task. Only requests as OpenAI's batch API"
            " takes them name their model themselves"
        )
    return dataset.model.name


def _less(total: int | None, done: int) -> int | None:
    return None if total is None else max(total - done, 0)


def _with_earlier(summary: Summary, done: Done) -> Summary:
    """Adds what an earlier process has done: the exit code is of the whole output."""
    ending = summary.ending
    if ending is Ending.SUCCEEDED and done.failed:
        ending = Ending.SOME_FAILED
    return replace(summary, ending=ending, before=len(done))
