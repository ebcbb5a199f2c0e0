"""Sending the rows of a dataset as jobs, and writing down what comes back."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from celery import Celery

from batchery.cli.app import check_backend, check_broker
from batchery.errors import SettingsError
from batchery_producer.diagnosis import check_workers, explain_silence
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Record, RowKey
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.results.answers import Answer
from batchery_producer.results.collector import collector_for
from batchery_producer.retry import Patience
from batchery_producer.run.loop import Run
from batchery_producer.run.output import Output
from batchery_producer.run.reader import Feed
from batchery_producer.run.resume import Survivors
from batchery_producer.run.summary import Summary
from batchery_producer.stream import Window


class Sending:
    """A task of an app, and how its jobs are sent."""

    def __init__(
        self,
        app: Celery,
        task: str,
        *,
        window: int,
        queue: str | None = None,
        keywords: Mapping[str, Any] | None = None,
        expires_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Makes sure that jobs can be sent, that somebody knows them, and results can come back.

        Args:
            app: Where the jobs are sent and the results are stored.
            task: Name of the task.
            window: Most jobs in flight.
            queue: By default as `Publisher` chooses.
            keywords: Keyword arguments of every job.
            expires_s: Jobs not begun by then, in seconds, fail as revoked.
            stop: Asked several times a second; True ends the run.

        Raises:
            RedisUnavailable: No Redis answers at one of the app's URLs.
            StartError: No other broker answers.
            SettingsError: The app or the task stores no results, the app does not allow the queue,
                or there are workers and none of them has the task.
            ValueError: The window is less than 1.
        """
        self._jobs = Window[str, RowKey, Answer](window)
        self.task = task
        check_backend(app)
        if getattr(app.tasks.get(task), "ignore_result", False):
            raise SettingsError(f"task {task!r} ignores its results; nothing would come back")
        check_broker(app)
        self._app = app
        self._stop = stop
        self._patience = Patience(stop)
        self._collector = collector_for(app, self._patience)
        options: dict[str, Any] = {} if expires_s is None else {"expires": expires_s}
        self._publisher = Publisher(
            app,
            task,
            queue=queue,
            keywords=keywords,
            patience=self._patience,
            persistent=True,
            **options,
        )
        check_workers(app, task, self._publisher.queue)

    def run(
        self, rows: Iterable[Record | Broken], files: Output, journal: Journal, **options: Any
    ) -> Summary:
        """Sends rows and waits for their results, once.

        Args:
            rows: What is to be sent.
            files: Are open.
            journal: Of the run.
            options: Of `Run`.

        Raises:
            DatasetError: As `Run.run`.
        """
        queue = self._publisher.queue
        survivors = Survivors(self._app, queue, journal.pattern, journal.window, self._patience)
        feed = Feed(rows, ahead=self._jobs.size)
        with closing(self._collector), self._publisher, closing(feed):
            summary = Run(
                feed,
                self._publisher,
                self._collector,
                files,
                self._jobs,
                task_id=lambda record: journal.task_id(record.source, record.line),
                lost=survivors.lost if files.is_resumed else list,
                stop=self._stop,
                explain=lambda: explain_silence(self._app, self.task, queue),
                **options,
            ).run()
            files.finish(complete=feed.exhausted and not summary.in_flight)
        return summary
