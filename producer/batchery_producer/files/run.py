"""A run of `submit_file`: it reads rows, sends jobs, collects results, and writes them down.

Rows are read ahead on a thread, the `Feed`; all else is one loop, `FileRun`, in the caller's
thread: a `Stream` sends jobs and gives their answers.
"""

import base64
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Generic, TypeVar

from celery import Celery
from kombu.exceptions import EncodeError

from batchery.cli.app import check_backend, check_broker
from batchery.errors import (
    BrokerRefused,
    DatasetError,
    GaveUp,
    InvalidItem,
    NoResult,
    QueueFull,
    SettingsError,
)
from batchery.installation import get_media_settings
from batchery.results import to_numpy
from batchery.retry import STOP_CHECK_S, Interrupted, RetryPolicy
from batchery.transport.dead_letters import MAX_MESSAGE_BYTES, check_size
from batchery_producer.answers import Answer, unpack
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import Collector
from batchery_producer.diagnosis import check_task, explain_stall
from batchery_producer.files.dataset import TABLES, Dataset, Record
from batchery_producer.files.journal import Journal
from batchery_producer.files.json_lines import orjson
from batchery_producer.files.options import Ending, Snapshot, SubmitOptions, Summary
from batchery_producer.files.output import Output
from batchery_producer.files.recovery import COMMAND_S, find_in_flight
from batchery_producer.publisher import Publisher
from batchery_producer.stream import WAIT_S, NewJob, Stream
from batchery_producer.template import encode_item

T = TypeVar("T")

#: Error type of rows that cannot become a job.
INVALID_LINE = "InvalidLine"

#: Error type of jobs whose result is too long for a line of the output.
RESULT_TOO_LARGE = "ResultTooLarge"


#: Maximum bytes of items in memory, and of those in flight, which are in Redis; of each, one item
#: more. Only items that are bytes count: files, and cells of tables.
MAX_HELD_BYTES = 256 << 20

#: How many times longer a message may be than the bytes in it: where JSON escapes each of them.
MAX_GROWTH = 8


class Feed(Generic[T]):
    """Iterates on a thread of its own, up to a fixed number of entries, or of bytes, ahead.

    So a slow input delays neither results nor Ctrl-C.

    Attributes:
        exhausted: Whether all entries were taken, and neither entries nor an error will follow.
    """

    def __init__(
        self, entries: Iterable[T], ahead: int, measure: Callable[[T], int] = lambda _: 0
    ) -> None:
        """Starts to read.

        Args:
            entries: What is iterated.
            ahead: Maximum number of entries that wait to be taken, at least 1.
            measure: How many bytes of an entry count.
        """
        self.exhausted = False
        self._measure, self._held_bytes, self._is_taken = measure, 0, threading.Condition()
        #: Those that were taken already, and are to be taken again.
        self._first: list[T] = []
        #: The last one is the feed itself.
        self._read = Queue[Any](ahead)
        self._is_ended = self._is_closed = False
        self._error: BaseException | None = None
        # A daemon, because a thread that waits for a pipe cannot be woken.
        threading.Thread(
            target=self._run, args=(entries,), name="batchery-feed", daemon=True
        ).start()

    def begin(self, stop: Callable[[], bool]) -> None:
        """Waits for the first entry, which is not taken.

        Raises:
            Interrupted: `stop` returned True.
            Exception: The error of the iteration, if no entry came before it.
        """
        while not (self._first or self.exhausted):
            if stop():
                raise Interrupted("asked to stop")
            self._first = self.take(1, STOP_CHECK_S)

    def take(self, maximum: int, wait_s: float = 0) -> list[T]:
        """Takes the entries that are there.

        Args:
            maximum: Maximum number of entries to return, at least 1.
            wait_s: How long to wait for the first one, in seconds.

        Returns:
            The entries, which may be none: see `exhausted`.

        Raises:
            Exception: The error of the iteration, once all entries before it were taken.
        """
        taken, self._first = self._first, []
        with suppress(Empty):
            while len(taken) < maximum and not self._is_ended:
                entry = self._read.get(timeout=0 if taken else wait_s)
                if entry is self:
                    self._is_ended = True
                else:
                    taken.append(entry)
                    self._count_bytes(-self._measure(entry))
        if self._is_ended and self._error is not None and not taken:
            raise self._error
        self.exhausted = self._is_ended and self._error is None
        return taken

    def close(self) -> None:
        """Lets the thread end; entries that were read ahead are lost."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._read.get_nowait()
        self._count_bytes(-self._held_bytes)

    def _count_bytes(self, more_bytes: int) -> None:
        if more_bytes:
            with self._is_taken:
                self._held_bytes += more_bytes
                self._is_taken.notify()

    def _run(self, entries: Iterable[T]) -> None:
        try:
            for entry in entries:
                self._count_bytes(self._measure(entry))
                self._read.put(entry)
                with self._is_taken:
                    self._is_taken.wait_for(
                        lambda: self._is_closed or self._held_bytes <= MAX_HELD_BYTES
                    )
                if self._is_closed:
                    break
            if isinstance(entries, Generator):
                # Closed here, because what the generator has open belongs to this thread.
                entries.close()
        except BaseException as error:  # noqa: BLE001 (raised again where it is taken)
            self._error = error
        if not self._is_closed:
            self._read.put(self)


class FileRun:
    """Submits the rows of a dataset, once."""

    def __init__(self, app: Celery, dataset: Dataset, task: str, options: SubmitOptions) -> None:
        """Checks that jobs can be sent, that a worker has the task, and that results come back.

        Args:
            app: App to which jobs are sent and in which results are stored.
            dataset: The input.
            task: Name of the task.
            options: Those for reading and writing files do not matter here.

        Raises:
            SettingsError: The app or the task stores no results, the app does not allow the queue,
                the task does not take the keywords, or there are workers and none of them has it.
        """
        check_backend(app)
        if getattr(app.tasks.get(task), "ignore_result", False):
            raise SettingsError(f"task {task!r} ignores its results, so none would come back")
        check_broker(app)
        check_task(app, task, options.queue)
        self.task = task
        self._app, self._dataset, self._options = app, dataset, options
        self._retries = RetryPolicy(options.stop, command_s=COMMAND_S)
        # Arrays are written much faster than lists, with the same digits.
        self._collector = Collector(app, self._retries, reads_packed=orjson is not None)
        sending = RetryPolicy(self._take_meanwhile, command_s=COMMAND_S)
        self._broker = BrokerConnection(app, sending, persistent=True)
        self._publisher = Publisher(
            app,
            self.task,
            queue=options.queue,
            keywords=options.keywords,
            wait_s=options.timeout_s,
            broker=self._broker,
            **options.sending,
        )
        self.queue = self._publisher.queue
        self._stream = Stream[Record](
            self._collector,
            self._publisher,
            options.window,
            missing=self._find_missing,
            timeout_s=options.timeout_s,
            explain=self.explain,
            notice=options.notice,
        )
        _check_keywords(app, self.task, options.keywords or {})
        known = app.tasks.get(self.task)
        self._is_json = (getattr(known, "serializer", None) or app.conf.task_serializer) == "json"
        self._succeeded = self._failed = self._submitted = self._flying_bytes = 0
        self._in_flight: Collection[str] | None = None

    def run(self, rows: Feed[Record], output: Output) -> Summary:
        """Sends rows and writes their results, to the end of the input or until the run is stopped.

        Those that the output has already are left out.

        Raises:
            DatasetError: The input is unusable, or the output can no longer be written. Results
                that were written stay.
        """
        assert output.journal is not None
        self._output, self._journal = output, output.journal
        self._began_s = time.monotonic()
        self._feed = rows
        with closing(self._collector), closing(self._broker):
            ending, message = self._run()
            seconds = time.monotonic() - self._began_s
            output.finish(complete=self._is_done)
        if ending is Ending.SUCCEEDED and (self._failed or output.done.failed):
            ending = Ending.SOME_FAILED
        return Summary(
            ending,
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._stream.in_flight),
            seconds,
            self.queue,
            message,
            output.done.count,
            *output.names,
            output.first_failure,
        )

    def explain(self) -> str:
        """Says why no results may come."""
        return explain_stall(self._app, self.task, {"queue": self.queue})

    def _run(self) -> tuple[Ending, str]:
        """How the run ended, and why if early."""
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not (self._is_done or self._options.stop()):
                jobs = self._take_jobs()
                has_room = self._room() > 0 and not self._feed.exhausted
                self._note_all(self._stream.step(jobs, has_room=has_room))
        except (GaveUp, NoResult, BrokerRefused, QueueFull) as error:
            ending, message = Ending.GAVE_UP, str(error)
        except Interrupted:
            pass  # It was asked to stop while it waited.
        finally:
            with suppress(GaveUp, Interrupted):
                if self._options.stop():  # Results that are ready now.
                    self._note_all(self._stream.take(self._collector.poll_all()))
            with suppress(GaveUp, Interrupted):
                self._flush()
        if ending is Ending.SUCCEEDED and not self._is_done:
            return Ending.INTERRUPTED, "interrupted"
        return ending, message

    def _take_meanwhile(self) -> bool:
        """Takes results while jobs wait for room, which these may need; returns whether to stop."""
        self._note_all(self._stream.take(self._collector.collect(0.0)))
        return self._options.stop()

    @property
    def _is_done(self) -> bool:
        """Whether every row is written, and none will follow."""
        return self._feed.exhausted and not self._stream.in_flight

    def _room(self) -> int:
        """How many jobs to send now."""
        return self._stream.room() if self._flying_bytes <= MAX_HELD_BYTES else 0

    def _take_jobs(self) -> list[NewJob[Record]]:
        """Jobs of the next rows, if there is room; rows that cannot become jobs fail here."""
        jobs, room = list[NewJob[Record]](), self._room()
        # With no job in flight, there is nothing but the input to wait for.
        wait_s = 0.0 if self._stream.in_flight else WAIT_S
        while room and not (jobs or self._options.stop()):
            rows = self._feed.take(room, wait_s)
            for row in rows:
                if (row.source, row.row) in self._output.done:
                    continue
                if broken := row.broken or self._refuse(row):
                    self._fail(row, INVALID_LINE, broken)
                    continue
                # The window holds no items, which may be large.
                task_id, bare = self._journal.task_id(row.source, row.row), row._replace(item=None)
                jobs.append(NewJob(task_id, row.item, 0, bare))
                self._flying_bytes += row.size_bytes
            if not rows:
                break
        return jobs

    def _refuse(self, row: Record) -> str:
        """Why no message can have an item, of a table or of bytes; empty if one can."""
        largest = self._dataset.max_bytes
        if row.size_bytes > largest:
            return f"has more bytes than media.max_bytes = {largest}"
        is_table = self._dataset.sources[row.source].format in TABLES
        is_small = 0 < row.size_bytes <= MAX_MESSAGE_BYTES // MAX_GROWTH
        if not self._is_json or is_small or not (is_table or row.size_bytes):
            return ""
        try:
            check_size(base64.b64encode(encode_item(row.item).encode()))
        except (EncodeError, InvalidItem) as error:
            return str(error)
        return ""

    def _find_missing(self, task_ids: Sequence[str]) -> Sequence[str]:
        if self._output.is_resumed:
            if self._in_flight is None:
                pattern = self._journal.pattern
                self._in_flight = find_in_flight(self._app, self.queue, pattern, self._retries)
            task_ids = self._collector.find_missing(task_ids, self._in_flight)
        self._submitted += len(task_ids)
        return task_ids

    def _note_all(self, ended: Iterable[tuple[str, Record, Answer]]) -> None:
        """Notes how jobs ended, and says how far the run is."""
        for task_id, row, stored in ended:
            self._flying_bytes -= row.size_bytes
            answer = unpack(stored, to_numpy)
            if answer.error is not None:
                self._fail(row, *answer.error)
            elif refused := self._output.result(row, answer.value):
                where = f"the result backend keeps it under {task_id} until it expires"
                self._fail(row, RESULT_TOO_LARGE, f"{refused}; {where}")
                continue
            else:
                self._succeeded += 1
            self._stream.discarded.append(task_id)
        if self._stream.flush_is_due:
            self._flush()
        self._options.progress(self._snapshot())

    def _fail(self, row: Record, type_: str, message: str) -> None:
        self._output.failure(row, type_, message)
        self._failed += 1

    def _flush(self) -> None:
        """Writes results before the backend removes them, so that none is lost."""
        self._output.flush()
        self._stream.flush()

    def _snapshot(self) -> Snapshot:
        total, seconds = self._dataset.total, time.monotonic() - self._began_s
        rate = (self._succeeded + self._failed) / seconds if seconds else 0.0
        return Snapshot(
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._stream.in_flight),
            rate,
            None if total is None else max(total - self._output.done.count, 0),
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
        task: Name of the task.
        output: Gets one line per result, in the order of completion; `-` is standard output.
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
    dataset = Dataset(source, options)
    files = Output(dataset, output, options)
    run = FileRun(app, dataset, task, options)
    settings = {"task": run.task, "kwargs": options.keywords or {}}
    dataset.done, dataset.max_bytes = files.done, get_media_settings(app).max_bytes
    feed = Feed(dataset.checked(), options.window, lambda row: row.size_bytes)
    with closing(feed) as rows, files:
        try:
            rows.begin(options.stop)
        except Interrupted:
            return Summary(Ending.INTERRUPTED, 0, 0, 0, 0, 0.0, "", "interrupted")
        options.began(dataset.description)
        files.open(Journal.of(dataset.sources, {**settings, **dataset.settings}))
        try:
            summary = run.run(rows, files)
        except DatasetError as error:
            raise DatasetError(f"{error}{files.hint}") from error
        return replace(summary, message=summary.message + files.hint)


def _check_keywords(app: Celery, task: str, keywords: Mapping[str, Any]) -> None:
    """Checks that a task of the app takes an item with these keywords, as `apply_async` would."""
    known: Any = app.tasks.get(task)
    # A model's task has no function whose arguments Celery could know.
    check = getattr(known, "__header__", None)
    if check is not None and known.typing:
        try:
            check(None, **keywords)
        except TypeError as error:
            raise SettingsError(f"task {task!r}: {error}; see --option") from None
