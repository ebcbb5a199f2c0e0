"""The bulk producer as a function: files in, a file out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery import Celery

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Done, Journal
from batchery_producer.run.loop import FileRun
from batchery_producer.run.options import SubmitOptions
from batchery_producer.run.output import Output
from batchery_producer.run.report import Report
from batchery_producer.run.summary import Ending, Summary


def submit_file(
    source: str | Path | Sequence[str | Path],
    task: str | None,
    output: str | Path,
    *,
    app: Celery,
    options: SubmitOptions | None = None,
    **changes: Any,
) -> Summary:
    """Submits every row of a file as a job, and writes every result to another file.

    Memory does not grow with the input. Redis may restart in between; a job whose message Redis has
    lost never comes back, and `timeout_s` ends the wait for it. Jobs are sent at least once.

    Args:
        source: Files, URLs, patterns such as `data/*.jsonl`, or `-` for standard input; as for
            `Dataset`.
        task: Name of the task; None for OpenAI's batch files, whose model names it.
        output: Gets one line per result, in the order of completion; `-` is standard output. A
            URL gets them at the end.
        app: Where the jobs are sent and the results are stored.
        options: What else can be chosen; by default nothing is.
        changes: Single options, in the place of those in `options`: `submit_file(..., limit=10)`.

    Returns:
        What was done, and how it ended.

    Raises:
        DatasetError: Input or output cannot be used, or the output cannot be written any more.
        RedisUnavailable: There is no Redis at the app's URL.
        StartError: There is no other broker, either.
        SettingsError: The app stores no results or does not allow the queue, or no worker has the
            task.
        TypeError: There is no such option.
        ValueError: The window is less than 1.
    """
    options = replace(options or SubmitOptions(), **changes)
    dataset = Dataset(source, **options.reading)
    files = Output(dataset, output, **options.writing)
    report = Report(options.report, dataset, output, options.errors) if options.report else None
    name = task_of(dataset, task)
    run = FileRun(app, name, options)
    settings = {
        "kwargs": dict(options.keywords or {}),
        **dataset.settings,
        "ordered": options.ordered,
    }
    with files:
        journal = files.open(Journal.of(dataset.sources, name, settings, options.window))
        summary = run.run(
            files.missing(dataset),
            files,
            journal,
            total=lambda: _less(dataset.total, len(files.done)),
            figures=report.figures if report else None,
        )
    summary = _with_earlier(summary, files.done)
    if report:
        report.write(name, summary)
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
