"""A run of `submit_file`: rows become jobs, and what comes back is written down."""

import base64
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.exceptions import EncodeError

from batchery.cli.app import check_backend, check_broker
from batchery.errors import (
    BatcheryError,
    BrokerRefused,
    DatasetError,
    GaveUp,
    InvalidItem,
    QueueFull,
    SettingsError,
)
from batchery.retry import Interrupted, RetryPolicy
from batchery.transport.dead_letters import check_size
from batchery_producer.answers import Answer
from batchery_producer.collector import collector_for
from batchery_producer.diagnosis import check_workers, explain_stall, find_task
from batchery_producer.files.dataset import TABLES, Dataset, Row, begin_reading
from batchery_producer.files.feed import Feed
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Record
from batchery_producer.publisher import Publisher
from batchery_producer.run.options import Ending, Snapshot, SubmitOptions, Summary
from batchery_producer.run.output import Output
from batchery_producer.run.recovery import COMMAND_S, InFlightRecovery
from batchery_producer.stream import NewJob, Stream, Window
from batchery_producer.template import encode_item

#: Number of samples of the count over which the rate is measured, and the time between two, in
#: seconds: a shorter span jumps with every batch, a longer one hides changes.
RATE_SAMPLES = 30
SAMPLE_S = 0.5

#: Error type of rows that cannot become a job.
INVALID_LINE = "InvalidLine"

#: Error type of jobs whose result is too long for a line of the output.
RESULT_TOO_LARGE = "ResultTooLarge"


class Rate:
    """Rate at which a count grows."""

    def __init__(self, now_s: float) -> None:
        self._samples = deque([(now_s, 0)], maxlen=RATE_SAMPLES)

    def per_second(self, now_s: float, count: int) -> float:
        """Notes the count, and returns its growth per second over the last seconds.

        Args:
            now_s: Time in seconds, from any start; never less than in the previous call.
            count: Total so far.
        """
        start_s, before = self._samples[0]
        if now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, count))
        return (count - before) / (now_s - start_s) if now_s > start_s else 0.0


class Stopped(BatcheryError):
    """A run ends at its first failure, as the caller asked."""


class FileRun:
    """Submits the rows of a dataset, once."""

    def __init__(self, app: Celery, dataset: Dataset, task: str, options: SubmitOptions) -> None:
        """Checks that jobs can be sent, that a worker has the task, and that results come back.

        Args:
            app: App to which jobs are sent and in which results are stored.
            dataset: The input.
            task: Name of the task, or alias of a model.
            options: Those for reading and writing files do not matter here.

        Raises:
            SettingsError: The app or the task stores no results, the app does not allow the queue,
                the task does not take the keywords, or there are workers and none of them has it.
        """
        self._window = Window[str, Record, Answer](options.window)
        check_backend(app)
        if getattr(app.tasks.get(task), "ignore_result", False):
            raise SettingsError(f"task {task!r} ignores its results, so none would come back")
        check_broker(app)
        self.task = find_task(app, task, options.queue)
        self._app = app
        self._dataset = dataset
        self._options = options
        self._retries = RetryPolicy(options.stop, command_s=COMMAND_S)
        self._collector = collector_for(app, self._retries)
        self._publisher = Publisher(
            app,
            self.task,
            queue=options.queue,
            keywords=options.keywords,
            wait_s=options.timeout_s,
            outage_policy=RetryPolicy(self._take_meanwhile, command_s=COMMAND_S),
            persistent=True,
            **options.sending,
        )
        self.queue = self._publisher.queue
        _check_keywords(app, self.task, options.keywords or {})
        check_workers(app, self.task, self.queue)

    def run(self, rows: Iterable[Row], output: Output) -> Summary:
        """Sends rows and writes their results, to the end of the input or until the run is stopped.

        Raises:
            DatasetError: The input is unusable, or the output can no longer be written. Results
                that were written stay.
        """
        assert output.journal is not None
        options, self._output, self._journal = self._options, output, output.journal
        pattern = self._journal.pattern
        recovery = InFlightRecovery(self._app, self.queue, pattern, self._retries)
        self._missing = recovery.missing if output.is_resumed else list
        self._submitted = self._succeeded = self._batched = self._batched_items = 0
        self._kinds: Counter[str] = Counter()
        self._stopped_by = ""
        self._began_s = time.monotonic()
        self._rate = Rate(self._began_s)
        self._feed = Feed(rows, ahead=self._window.size)
        self._stream = Stream(
            self._collector,
            self._window,
            self,
            self._publisher,
            missing=self._find_missing,
            keep_results=options.keep_results,
            timeout_s=options.timeout_s,
            explain=lambda: explain_stall(self._app, self.task, {"queue": self.queue}),
            notice=options.notice,
        )
        with closing(self._collector), self._publisher, closing(self._feed):
            ending, message = self._run()
            seconds = time.monotonic() - self._began_s
            output.finish(complete=self._feed.exhausted and not self._window)
        not_found = self._dataset.not_found
        failed = self._kinds.total()
        if ending is Ending.SUCCEEDED and (failed or output.done.failed or not_found):
            ending = Ending.SOME_FAILED
        return Summary(
            ending,
            self._submitted,
            self._succeeded,
            failed,
            len(self._window),
            seconds,
            self.queue,
            message or not_found,
            output.done.count,
            *output.names,
            output.first_failure,
        )

    def _run(self) -> tuple[Ending, str]:
        """How the run ended, and why if early."""
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not self._stream.is_done:
                if self._options.stop():
                    raise Interrupted("asked to stop")
                self._note_all(self._stream.step())
                if over := self._stream.stalled():
                    raise GaveUp(over)
        except (GaveUp, BrokerRefused, QueueFull) as error:
            ending, message = Ending.GAVE_UP, str(error)
        except (Interrupted, Stopped) as error:
            ending, message = Ending.INTERRUPTED, "interrupted"
            if isinstance(error, Stopped):
                ending, message = Ending.SOME_FAILED, str(error)
            with suppress(GaveUp, Interrupted, Stopped):  # Results that are ready now.
                self._note_all(self._stream.take(self._collector.poll_all()))
        finally:
            with suppress(GaveUp, Interrupted):
                self._flush()
        return ending, message

    def _take_meanwhile(self) -> bool:
        """Takes results while jobs wait for room, which these may need; returns whether to stop."""
        self._note_all(self._stream.take(self._collector.collect(0.0)))
        return self._options.stop()

    @property
    def exhausted(self) -> bool:
        """As `JobSource.exhausted`."""
        return self._feed.exhausted

    def take(self, maximum: int, wait_s: float) -> list[NewJob[Record]]:
        """As `JobSource.take`; rows that cannot become jobs fail here."""
        jobs = list[NewJob[Record]]()
        for row in self._feed.take(maximum, wait_s):
            if reason := row.reason if isinstance(row, Broken) else self._refuse(row):
                self._fail(row, INVALID_LINE, reason)
                continue
            assert isinstance(row, Record)
            task_id = self._journal.task_id(row.source, row.row)
            # The window holds no items, which may be large.
            jobs.append(NewJob(task_id, row.item, 0, replace(row, item=None)))
        return jobs

    def _refuse(self, row: Record) -> str:
        """Why no message can have an item, which only a table can hold; empty if one can."""
        known = self._app.tasks.get(self.task)
        serializer = getattr(known, "serializer", None) or self._app.conf.task_serializer
        if serializer != "json" or self._dataset.sources[row.source].format not in TABLES:
            return ""
        try:
            check_size(base64.b64encode(encode_item(row.item).encode()))
        except (EncodeError, InvalidItem) as error:
            return str(error)
        return ""

    def _find_missing(self, task_ids: Sequence[str]) -> Sequence[str]:
        missing = self._missing(task_ids)
        self._submitted += len(missing)
        return missing

    def _note_all(self, ended: Iterable[tuple[str, Record, Answer]]) -> None:
        """Notes how jobs ended, and what there is to say of the run.

        Raises:
            Stopped: The run ends at its first failure, and has met it.
        """
        for task_id, row, answer in ended:
            if self._note(task_id, row, answer):
                self._stream.discard(task_id)
        if self._stream.flush_is_due:
            self._flush()
        self._options.progress(self._snapshot())
        if self._stopped_by:
            raise Stopped(self._stopped_by)

    def _note(self, task_id: str, row: Record, answer: Answer) -> bool:
        """Adds an answer to the output; returns whether the backend may remove it."""
        if answer.batch_size:
            self._batched += 1
            self._batched_items += answer.batch_size
        if answer.error is not None:
            self._fail(row, *answer.error)
        elif refused := self._output.result(row, answer.value):
            where = f"the result backend keeps it under {task_id} until it expires"
            self._fail(row, RESULT_TOO_LARGE, f"{refused}; {where}")
            return False
        else:
            self._succeeded += 1
        return True

    def _fail(self, row: Row, type_: str, message: str) -> None:
        said = self._output.failure(row, type_, message)
        self._kinds[type_] += 1
        if self._options.stop_at_failure and not self._stopped_by:
            self._stopped_by = f"stopped at {said}"

    def _flush(self) -> None:
        """Writes results before the backend removes them, so that none is lost."""
        self._output.flush()
        self._stream.flush()

    def _snapshot(self) -> Snapshot:
        now_s, failed, total = time.monotonic(), self._kinds.total(), self._dataset.total
        return Snapshot(
            self._submitted,
            self._succeeded,
            failed,
            len(self._window),
            now_s - self._began_s,
            self._rate.per_second(now_s, self._succeeded + failed),
            None if total is None else max(total - self._output.done.count, 0),
            self._batched_items / self._batched if self._batched else 0.0,
            dict(self._kinds.most_common()),
        )


def submit_file(
    source: str | Path | Sequence[str | Path],
    task: str,
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
        task: Name of the task, or alias of a model.
        output: Gets one line per result, in the order of completion; `-` is standard output. A
            URL gets them when every row is done.
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
    run = FileRun(app, dataset, task, options)
    try:
        rows = begin_reading(dataset, options.stop)
    except Interrupted:
        return Summary(Ending.INTERRUPTED, 0, 0, 0, 0, 0.0, "", "interrupted")
    settings = {"kwargs": dict(options.keywords or {}), **dataset.settings}
    settings["ordered"] = options.ordered
    options.began(dataset.description)
    with files:
        files.open(Journal.of(dataset.sources, run.task, settings))
        try:
            return run.run(files.missing(rows), files)
        except DatasetError as error:
            hint = "; --resume goes on from here" if files.is_begun else ""
            raise DatasetError(f"{error}{hint}") from error


def _check_keywords(app: Celery, task: str, keywords: Mapping[str, Any]) -> None:
    """Checks that a task of the app takes an item with these keywords, as `apply_async` would."""
    known: Any = app.tasks.get(task)
    # A model's task has no function whose arguments Celery could know.
    check = getattr(known, "__header__", None)
    if check is not None and known.typing:
        try:
            check(None, **keywords)
        except TypeError as error:
            raise SettingsError(f"task {task!r}: {error}; see --kwargs and --option") from None
