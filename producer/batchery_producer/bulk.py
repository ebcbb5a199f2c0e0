"""The bulk producer as a function: a file in, a file out."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery

from batchery.errors import SettingsError
from batchery.named_app import check_backend, check_broker
from batchery_producer.collect import collector_for
from batchery_producer.dataset import Dataset
from batchery_producer.feed import Feed
from batchery_producer.output import Output
from batchery_producer.patience import Patience
from batchery_producer.publish import Publisher
from batchery_producer.run import Run
from batchery_producer.silence import explain_silence
from batchery_producer.summary import Snapshot, Summary
from batchery_producer.window import Window

logger = logging.getLogger(__name__)

#: Jobs in flight: some batches for each of several devices, and still little memory.
WINDOW = 1024


def submit_file(
    source: str | Path,
    task: str,
    output: str | Path,
    *,
    app: Celery,
    queue: str | None = None,
    keywords: Mapping[str, Any] | None = None,
    format: str | None = None,  # noqa: A002 (what every tool calls it)
    field: str | None = None,
    id_field: str | None = None,
    limit: int | None = None,
    errors: str | Path | None = None,
    overwrite: bool = False,
    keep_results: bool = False,
    window: int = WINDOW,
    expires_s: float | None = None,
    timeout_s: float | None = None,
    progress: Callable[[Snapshot], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    notice: Callable[[str], None] = logger.warning,
) -> Summary:
    """Submits every row of a file as a job, and writes every result to another file.

    Memory does not grow with the input. Redis may restart in between; a job whose message Redis has
    lost never comes back, and `timeout_s` ends the wait for it. Jobs are sent at least once.

    Args:
        source: JSON lines, CSV, TSV or text, or `-` for standard input; gzip is recognised.
        task: Name of the task.
        output: Gets one line per result, in the order of completion; `-` is standard output.
        app: Where the jobs are sent and the results are stored.
        queue: By default as the app routes the task; if the app does not know it, the task's name.
        keywords: Keyword arguments of every job.
        format: As for `Dataset`, like `field`, `id_field` and `limit`.
        field: Which field is the item.
        id_field: Which field is the caller's id.
        limit: Submit only so many rows.
        errors: Gets one line per failure; by default `<output>.errors.jsonl`.
        overwrite: Replace an output that is there.
        keep_results: Leave results in the backend, too, until they expire.
        window: Most jobs in flight.
        expires_s: Jobs not begun by then, in seconds, fail as revoked.
        timeout_s: Give up when no result has come for so long, in seconds.
        progress: Called several times a second, on this thread.
        stop: Asked several times a second; True ends the run. Jobs in flight stay where they are.
        notice: Gets lines for the user; one when nothing comes for a while.

    Returns:
        What was done, and how it ended.

    Raises:
        DatasetError: Input or output cannot be used, or the output cannot be written any more.
        RedisUnavailable: There is no Redis at the app's URL.
        StartError: There is no other broker, either.
        SettingsError: The app stores no results, or does not allow the queue.
        ValueError: The window is less than 1.
    """
    dataset = Dataset(source, format=format, field=field, id_field=id_field, limit=limit)
    files = Output(dataset, output, errors, overwrite=overwrite)
    jobs = Window(window)
    check_app(app, task)
    patience = Patience(stop)
    publisher = Publisher(
        app, task, queue=queue, keywords=keywords, expires_s=expires_s, patience=patience
    )
    feed = Feed(dataset, ahead=window)
    try:
        with publisher, files:
            return Run(
                feed,
                publisher,
                collector_for(app, patience),
                files,
                jobs,
                total=lambda: dataset.total,
                keep_results=keep_results,
                timeout_s=timeout_s,
                stop=stop,
                progress=progress,
                explain=lambda: explain_silence(app, task, publisher.queue),
                notice=notice,
            ).run()
    finally:
        feed.close()


def check_app(app: Celery, task: str) -> None:
    """Makes sure that jobs can be sent and results can come back.

    Raises:
        RedisUnavailable: No Redis answers at one of the app's URLs.
        StartError: No other broker answers.
        SettingsError: The app or the task stores no results.
    """
    check_backend(app)
    if getattr(app.tasks.get(task), "ignore_result", False):
        raise SettingsError(f"task {task!r} ignores its results; nothing would come back")
    check_broker(app)
