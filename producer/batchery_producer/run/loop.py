"""A run: submits the rows of a dataset through a window, and writes down what comes back."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace

from celery import Celery

from batchery.cli.app import check_backend, check_broker
from batchery.errors import BatcheryError, SettingsError
from batchery_producer.diagnosis import check_workers, explain_stall, find_task
from batchery_producer.files.dataset import Feed
from batchery_producer.files.journal import Journal
from batchery_producer.files.openai_batch import INVALID_LINE, in_form
from batchery_producer.files.records import Broken, Record
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.results.answers import Answer, joined
from batchery_producer.results.collector import collector_for
from batchery_producer.retry import GaveUp, Interrupted, RetryPolicy
from batchery_producer.run.options import SubmitOptions
from batchery_producer.run.output import RunOutput
from batchery_producer.run.report import Figures
from batchery_producer.run.resume import InFlightRecovery
from batchery_producer.run.summary import Ending, Snapshot, Summary
from batchery_producer.stream import NewJob, Stream, Window

#: Time over which the current rate is measured, in seconds: a shorter one jumps with every batch, a
#: longer one hides changes.
RATE_SPAN_S = 15.0

#: Minimum time between two samples of the rate, in seconds; limits how many are kept.
SAMPLE_S = 0.5

#: Error type of jobs whose result is too long for a line of the output.
RESULT_TOO_LARGE = "ResultTooLarge"


class Rate:
    """Rate at which a count grows."""

    def __init__(self, now_s: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    def per_second(self, now_s: float, count: int) -> float:
        """Notes the count, and returns its growth per second over the last seconds.

        Args:
            now_s: Time in seconds, from any start; never less than in the previous call.
            count: Total so far.
        """
        samples = self._samples
        start_s, before = samples[0]
        if now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((now_s, count))
            while len(samples) > 2 and now_s - samples[1][0] >= RATE_SPAN_S:
                samples.popleft()
        return (count - before) / (now_s - start_s) if now_s > start_s else 0.0


class Stopped(BatcheryError):
    """A run ends at its first failure, as the caller asked."""


class FileRun:
    """Submits the rows of a dataset, once."""

    def __init__(
        self, app: Celery, task: str, options: SubmitOptions, *, is_certain: bool = False
    ) -> None:
        """Checks that jobs can be sent, that a worker has the task, and that results come back.

        Args:
            app: App to which jobs are sent and in which results are stored.
            task: Name of the task, or alias of a model.
            options: Those for reading and writing files do not matter here.
            is_certain: Whether the task has this name, and a worker for it may come yet: then
                workers are not asked, which may take seconds.

        Raises:
            RedisUnavailable: No Redis answers at one of the app's URLs.
            StartError: No other broker answers.
            SettingsError: The app or the task stores no results, the app does not allow the queue,
                or there are workers and none of them has the task.
            ValueError: The window is less than 1.
        """
        self._window = Window[str, Record, Answer](options.window)
        check_backend(app)
        if getattr(app.tasks.get(task), "ignore_result", False):
            raise SettingsError(f"task {task!r} ignores its results, so none would come back")
        check_broker(app)
        self.task = task if is_certain else find_task(app, task, options.queue)
        self._app = app
        self._options = options
        self._retries = RetryPolicy(options.stop)
        self._collector = collector_for(app, self._retries)
        self._publisher = Publisher(
            app,
            self.task,
            queue=options.queue,
            keywords=options.keywords,
            outage_policy=self._retries,
            persistent=True,
            **options.sending,
        )
        if not is_certain:
            check_workers(app, self.task, self._publisher.queue)

    def run(
        self,
        rows: Iterable[Record | Broken],
        output: RunOutput,
        journal: Journal,
        *,
        total: Callable[[], int | None] = lambda: None,
        figures: Figures | None = None,
    ) -> Summary:
        """Sends rows and writes their results, to the end of the input or until the run is stopped.

        Args:
            rows: Rows to send.
            output: The output, which is open.
            journal: Journal of the run.
            total: Returns the number of lines of the input, or None.
            figures: Collects figures for the report.

        Raises:
            DatasetError: The input is unusable, or the output can no longer be written. Results
                that were written stay.
        """
        queue, options = self._publisher.queue, self._options
        recovery = InFlightRecovery(
            self._app, queue, journal.pattern, journal.window, self._retries
        )
        self._missing = recovery.missing if output.is_resumed else list
        self._output, self._journal, self._total = output, journal, total
        self._figures = figures or Figures()
        self._submitted = self._succeeded = self._failed = 0
        self._first_failure = self._stopped_by = ""
        self._began_s = time.monotonic()
        self._rate = Rate(self._began_s)
        self._feed = Feed(rows, ahead=self._window.size)
        self._stream = Stream(
            self._collector,
            self._window,
            self,
            self._publisher,
            missing=self._to_be_sent,
            keep_results=options.keep_results,
            flush_s=options.flush_s,
            timeout_s=options.timeout_s,
            explain=lambda: explain_stall(self._app, self.task, queue),
            notice=options.notice,
        )
        with closing(self._collector), self._publisher, closing(self._feed):
            summary = self._run()
            output.finish(complete=self._feed.exhausted and not summary.in_flight)
        return summary

    def _run(self) -> Summary:
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not self._stream.is_done:
                self._step()
        except GaveUp as error:
            ending, message = Ending.GAVE_UP, str(error)
        except (Interrupted, Stopped) as error:
            ending, message = Ending.INTERRUPTED, "interrupted"
            if isinstance(error, Stopped):
                ending, message = Ending.SOME_FAILED, str(error)
            with suppress(GaveUp, Interrupted):  # Results that are ready now.
                self._note_all(self._stream.take(self._collector.poll_all()))
        finally:
            with suppress(GaveUp, Interrupted):
                self._flush()
        self._options.progress(self._snapshot())
        if ending is Ending.SUCCEEDED and self._failed:
            ending = Ending.SOME_FAILED
        return Summary(
            ending,
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            self._elapsed_s(),
            self._publisher.queue,
            message,
            first_failure=self._first_failure,
        )

    def _step(self) -> None:
        if self._options.stop():
            raise Interrupted("asked to stop")
        self._note_all(self._stream.step())
        self._options.progress(self._snapshot())
        if self._stopped_by:
            raise Stopped(self._stopped_by)
        if over := self._stream.stalled():
            raise GaveUp(over)

    @property
    def queue(self) -> str:
        """Name of the queue to which jobs are sent."""
        return self._publisher.queue

    @property
    def in_flight(self) -> Sequence[str]:
        """Ids of the jobs that were sent and have not ended."""
        return self._window.in_flight

    @property
    def exhausted(self) -> bool:
        """As `JobSource.exhausted`."""
        return self._feed.exhausted

    def take(self, maximum: int, wait_s: float) -> list[NewJob[Record]]:
        """As `JobSource.take`; rows that cannot become jobs fail here."""
        jobs = []
        for row in self._feed.take(maximum, wait_s):
            if isinstance(row, Broken):
                self._fail(row, INVALID_LINE, row.reason)
                continue
            self._figures.read(row.item if row.item_count else [row.item])
            task_id = self._journal.task_id(row.source, row.line)
            # The window holds no items, which may be large.
            itemless = replace(row, item=None)
            jobs.append(NewJob(task_id, row.item, row.item_count, itemless))
        return jobs

    def _to_be_sent(self, task_ids: Sequence[str]) -> Sequence[str]:
        missing = self._missing(task_ids)
        self._submitted += len(missing)
        self._figures.sent(self._elapsed_s(), missing)
        return missing

    def _note_all(self, ended: Iterable[tuple[str, Record, Answer]]) -> None:
        for task_id, row, answer in ended:
            if self._note(task_id, row, answer):
                self._stream.discard(task_id)
        if self._stream.flush_is_due:
            self._flush()

    def _note(self, task_id: str, row: Record, answer: Answer) -> bool:
        """Adds an answer to the output; returns whether the backend may remove it."""
        self._figures.ended(self._elapsed_s(), task_id, answer.batch_size)
        if row.item_count:
            answer = joined(answer, row.item_count)
        if row.form is not None and answer.error is None:
            answer = in_form(answer, row.form)
        if answer.error is not None:
            self._fail(row, *answer.error)
        elif refused := self._output.result(row, answer.value):
            where = f"the result backend keeps it under {task_id} until it expires"
            self._fail(row, RESULT_TOO_LARGE, f"{refused}; {where}")
            return False
        else:
            self._succeeded += 1
            self._figures.succeeded(self._elapsed_s())
        return True

    def _fail(self, row: Record | Broken, type_: str, message: str) -> None:
        self._failed += 1
        self._output.failure(row, type_, message)
        where = self._output.line_name(row)
        self._figures.failed(self._elapsed_s(), where, type_, message)
        self._first_failure = self._first_failure or f"{where}: {type_}: {message}"
        if self._options.stop_at_failure and not self._stopped_by:
            self._stopped_by = f"stopped at {where}: {type_}: {message}"

    def _flush(self) -> None:
        """Writes results before the backend removes them, so that none is lost."""
        self._output.flush()
        self._stream.flush()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        done = self._succeeded + self._failed
        return Snapshot(
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            now_s - self._began_s,
            self._rate.per_second(now_s, done),
            self._total(),
            self._figures.batch_sizes.mean,
            {kind.name: kind.count for kind in self._figures.kinds},
        )
