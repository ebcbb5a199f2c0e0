"""`submit_file`: rows of files become jobs, and results become a file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery import Celery

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset, begin_reading
from batchery_producer.files.journal import FinishedLines, Journal
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

    Memory does not grow with the input. Redis may restart during the run; a job whose message Redis
    loses never ends, and `timeout_s` limits the wait for it. Jobs are sent at least once.

    Args:
        source: Files, URLs, patterns such as `data/*.jsonl`, or `-` for standard input; as for
            `Dataset`.
        task: Name of the task, or alias of a model; None for OpenAI's batch files, whose model
            names it.
        output: Gets one line per result, in the order of completion; `-` is standard output. A
            URL gets them at the end.
        app: App to which jobs are sent and in which results are stored.
        options: All other options.
        changes: Single options, which override those in `options`: `submit_file(..., limit=10)`.

    Returns:
        Counts, and how the run ended.

    Raises:
        DatasetError: Input or output cannot be used, or the output can no longer be written.
        RedisUnavailable: No Redis answers at one of the app's URLs.
        StartError: No other broker answers.
        SettingsError: The app stores no results or does not allow the queue, or there are workers
            and none of them has the task.
        TypeError: An option is unknown.
        ValueError: The window is less than 1.
    """
    options = replace(options or SubmitOptions(), **changes)
    dataset = Dataset(source, **options.reading)
    files = Output(dataset, output, **options.writing)
    report = Report(options.report, dataset, output, options.errors) if options.report else None
    run = start_run(app, dataset, task, options)
    settings = {
        "kwargs": dict(options.keywords or {}),
        **dataset.settings,
        "ordered": options.ordered,
    }
    rows = begin_reading(dataset, options.stop)
    if rows is None:
        return Summary(Ending.INTERRUPTED, 0, 0, 0, 0, 0.0, run.queue, "interrupted")
    options.began(dataset.description)
    with files:
        journal = files.open(Journal.of(dataset.sources, run.task, settings, options.window))
        summary = run.run(
            files.missing(rows),
            files,
            journal,
            total=lambda: _less(dataset.total, len(files.done)),
            figures=report.figures if report else None,
        )
    results, errors = files.names
    summary = replace(_with_earlier(summary, files.done), results=results, errors=errors)
    if report:
        report.write(run.task, summary)
    return summary


def start_run(app: Celery, dataset: Dataset, task: str | None, options: SubmitOptions) -> FileRun:
    """The run of a dataset, by the named task or by that of the model of its requests.

    Raises:
        DatasetError: There is neither.
        BatcheryError: Jobs cannot be sent; as `FileRun` does.
    """
    run = FileRun(app, choose_task(dataset, task), options)
    if task is None:
        dataset.is_own_name = run.task.__eq__
    return run


def choose_task(dataset: Dataset, task: str | None) -> str:
    """The named task, or the model of OpenAI's requests.

    Raises:
        DatasetError: There is neither.
    """
    if task is not None:
        return task
    if not dataset.model:
        raise DatasetError(
            f"{dataset.name}: no task; name one with --task. Only requests of OpenAI's batch API"
            " name their model themselves"
        )
    return dataset.model


def _less(total: int | None, done: int) -> int | None:
    return None if total is None else max(total - done, 0)


def _with_earlier(summary: Summary, done: FinishedLines) -> Summary:
    """Adds the rows of an earlier process, as the exit code is that of the whole output."""
    ending = summary.ending
    if ending is Ending.SUCCEEDED and done.failed:
        ending = Ending.SOME_FAILED
    return replace(summary, ending=ending, before=len(done))
