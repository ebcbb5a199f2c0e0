"""A run of `submit_file`: rows become jobs, and what comes back is written down.

A run that goes on with an earlier one looks first for jobs that are still in flight. A job moves
one way only: from its queue to a worker, then to a result. A search in this order finds every job;
it may find a job twice that moves meanwhile.
"""

import base64
import json
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import redis
from celery import Celery, states
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult
from celery.utils.functional import chunks
from kombu.exceptions import EncodeError, OperationalError
from kombu.transport import redis as kombu_redis
from redis.exceptions import NoPermissionError

from batchery.cli.app import check_backend, check_broker
from batchery.errors import (
    BatcheryError,
    BrokerRefused,
    DatasetError,
    GaveUp,
    InvalidItem,
    QueueFull,
    RedisUnavailable,
    SettingsError,
)
from batchery.retry import Interrupted, RetryPolicy
from batchery.transport.dead_letters import check_size
from batchery.transport.redis_schema import Keys, find_tenant_lists
from batchery_producer.answers import Answer, joined
from batchery_producer.collector import collector_for
from batchery_producer.diagnosis import check_workers, explain_stall, find_task
from batchery_producer.files.dataset import Dataset, Feed, begin_reading
from batchery_producer.files.journal import Journal
from batchery_producer.files.openai_batch import INVALID_LINE, in_form
from batchery_producer.files.records import Broken, Record
from batchery_producer.files.rows import TABLES
from batchery_producer.publisher import Publisher
from batchery_producer.run.options import Ending, Snapshot, SubmitOptions, Summary
from batchery_producer.run.output import Output
from batchery_producer.stream import NewJob, Stream, Window
from batchery_producer.template import encode_item

#: Number of messages that are read from Redis at a time.
CHUNK = 256

#: How long workers may take to name their active jobs, in seconds.
ASK_S = 1.0

#: How long Redis may take for one command, in seconds; then it hangs.
COMMAND_S = 30.0

#: Errors after which to retry.
ERRORS = (redis.ConnectionError, redis.TimeoutError, OSError, OperationalError)

#: Time over which the current rate is measured, in seconds: a shorter one jumps with every batch, a
#: longer one hides changes.
RATE_SPAN_S = 15.0

#: Minimum time between two samples of the rate, in seconds; limits how many are kept.
SAMPLE_S = 0.5

#: Error type of jobs whose result is too long for a line of the output.
RESULT_TOO_LARGE = "ResultTooLarge"


class InFlightRecovery:
    """Determines which jobs must be sent again."""

    def __init__(
        self,
        app: Celery,
        queue: str,
        pattern: "re.Pattern[bytes]",
        max_in_flight: int,
        retries: RetryPolicy,
    ) -> None:
        """Prepares; the first call of `missing` looks for jobs that have no result yet.

        Args:
            app: App whose broker and backend to search.
            queue: Queue to which the jobs were sent.
            pattern: Matches the ids of the run in a message.
            max_in_flight: Maximum number of the run's jobs that can have been in flight.
            retries: How long to retry when Redis is away.
        """
        self._app = app
        self._queue = queue
        self._pattern = pattern
        self._max_in_flight = max_in_flight
        self._missing_in_a_row = 0
        self._retries = retries
        self._in_flight: set[str] | None = None

    def missing(self, task_ids: Sequence[str]) -> list[str]:
        """Jobs out of some, the oldest first, that are neither in flight nor ended.

        A run sends its jobs in the order of the input. So when as many jobs in a row are missing as
        can have been in flight, none of the following was sent, and this stops searching.

        Raises:
            RedisUnavailable: Its user may not read messages.
        """
        if self._missing_in_a_row >= self._max_in_flight:
            return list(task_ids)
        if self._in_flight is None:
            self._in_flight = self._retries.call(self._search, ERRORS)
        absent = [task_id for task_id in task_ids if task_id not in self._in_flight]
        ended = self._retries.call(lambda: set(_ended(self._app, absent)), ERRORS)
        missing = [task_id for task_id in absent if task_id not in ended]
        self._missing_in_a_row = (
            self._missing_in_a_row + len(missing) if missing == list(task_ids) else 0
        )
        return missing

    def _search(self) -> set[str]:
        try:
            return set(_find_in_flight(self._app, self._queue, self._pattern))
        except NoPermissionError as error:
            raise RedisUnavailable(
                "the broker does not let its user look for jobs that wait or run, as a run that"
                f" goes on must: {error}; use the user `operator` of `batchery acl`"
            ) from error


def _find_in_flight(app: Celery, queue: str, pattern: "re.Pattern[bytes]") -> Iterator[str]:
    with app.connection_for_read() as connection:
        if not issubclass(connection.get_transport_cls(), kombu_redis.Transport):
            # The queues of other brokers cannot be searched, so their jobs are sent again.
            return
        limits: Any = connection.transport_options
        limits["socket_timeout"] = limits.get("socket_timeout") or COMMAND_S
        channel: Any = connection.default_channel
        for message in _messages(channel, queue):
            yield from (found.decode() for found in pattern.findall(message))
    # Jobs of ordinary tasks are in no list of Redis while they run.
    active = app.control.inspect(timeout=ASK_S).active() or {}
    yield from (
        found.decode()
        for jobs in active.values()
        for found in pattern.findall(json.dumps([each.get("id") for each in jobs]).encode())
    )


def _messages(channel: Any, queue: str) -> Iterator[bytes]:
    """Messages in the queue, then those of workers: Batchery's leases, and Celery's unacked."""
    # kombu's own client would add its key prefix to some keys only.
    client: Any = redis.Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix)
    for step in channel.priority_steps:
        own = keys.queue(channel._q_for_pri(queue, step))
        yield from _waiting(client, own)
        for of_tenant in find_tenant_lists(client, keys, own):
            yield from _waiting(client, of_tenant)
        # From there, those that go next may have come back.
        yield from client.lrange(own, -CHUNK, -1)
    held = [keys.lease(_text(worker)) for worker in client.zrange(keys.workers, 0, -1)]
    for key in (*held, keys.queue(channel.unacked_key)):
        for _, value in client.hscan_iter(key, count=CHUNK):
            yield value


def _waiting(client: Any, key: str | bytes) -> Iterator[bytes]:
    """Messages, the newest first, so that none is skipped while the oldest leave."""
    start = 0
    while messages := client.lrange(key, start, start + CHUNK - 1):
        yield from messages
        start += len(messages)


def _ended(app: Celery, task_ids: Iterable[str]) -> Iterator[str]:
    backend: Any = app.backend
    if not isinstance(backend, RedisBackend):
        yield from (each for each in task_ids if AsyncResult(each, app=app).ready())
        return
    for some in chunks(iter(task_ids), CHUNK):
        stored = backend.client.mget([backend.get_key_for_task(each) for each in some])
        for task_id, value in zip(some, stored, strict=True):
            if value is not None and backend.decode(value).get("status") in states.READY_STATES:
                yield task_id


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


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


def check_keywords(app: Celery, task: str, keywords: Mapping[str, Any]) -> None:
    """Checks that a task of the app takes an item with these keywords, as `apply_async` would.

    Raises:
        SettingsError: It does not.
    """
    known: Any = app.tasks.get(task)
    # A model's task has no function whose arguments Celery could know.
    check = getattr(known, "__header__", None)
    if check is not None and known.typing:
        try:
            check(None, **keywords)
        except TypeError as error:
            raise SettingsError(f"task {task!r}: {error}; see --kwargs and --option") from None


class FileRun:
    """Submits the rows of a dataset, once."""

    def __init__(
        self, app: Celery, dataset: Dataset, task: str | None, options: SubmitOptions
    ) -> None:
        """Checks that jobs can be sent, that a worker has the task, and that results come back.

        Args:
            app: App to which jobs are sent and in which results are stored.
            dataset: The input.
            task: Name of the task, or alias of a model; None for the model of OpenAI's requests.
            options: Those for reading and writing files do not matter here.

        Raises:
            SettingsError: The app or the task stores no results, the app does not allow the queue,
                the task does not take the keywords, or there are workers and none of them has it.
        """
        name = choose_task(dataset, task)
        self._window = Window[str, Record, Answer](options.window)
        check_backend(app)
        if getattr(app.tasks.get(name), "ignore_result", False):
            raise SettingsError(f"task {name!r} ignores its results, so none would come back")
        check_broker(app)
        self.task = find_task(app, name, options.queue)
        if task is None:
            dataset.is_own_name = self.task.__eq__
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
        check_keywords(app, self.task, options.keywords or {})
        check_workers(app, self.task, self.queue)

    def run(self, rows: Iterable[Record | Broken], output: Output) -> Summary:
        """Sends rows and writes their results, to the end of the input or until the run is stopped.

        Raises:
            DatasetError: The input is unusable, or the output can no longer be written. Results
                that were written stay.
        """
        assert output.journal is not None
        options, journal = self._options, output.journal
        recovery = InFlightRecovery(
            self._app, self.queue, journal.pattern, journal.window, self._retries
        )
        self._missing = recovery.missing if output.is_resumed else list
        self._output, self._journal = output, journal
        self._kinds: Counter[str] = Counter()
        self._batched = self._batched_items = 0
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
            timeout_s=options.timeout_s,
            explain=lambda: explain_stall(self._app, self.task, {"queue": self.queue}),
            notice=options.notice,
        )
        with closing(self._collector), self._publisher, closing(self._feed):
            ending, message = self._run()
            seconds = time.monotonic() - self._began_s
            output.finish(complete=self._feed.exhausted and not self._window)
        not_found = self._dataset.not_found
        if ending is Ending.SUCCEEDED and (self._failed or output.done.failed or not_found):
            ending = Ending.SOME_FAILED
        return Summary(
            ending,
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            seconds,
            self.queue,
            message or not_found,
            len(output.done),
            *output.names,
            self._first_failure,
        )

    def _run(self) -> tuple[Ending, str]:
        """How the run ended, and why if early."""
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not self._stream.is_done:
                self._step()
        except (GaveUp, BrokerRefused, QueueFull) as error:
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
        return ending, message

    def _step(self) -> None:
        if self._options.stop():
            raise Interrupted("asked to stop")
        self._note_all(self._stream.step())
        self._options.progress(self._snapshot())
        if self._stopped_by:
            raise Stopped(self._stopped_by)
        if over := self._stream.stalled():
            raise GaveUp(over)

    def _take_meanwhile(self) -> bool:
        """Takes results while jobs wait for room, which these may need; returns whether to stop."""
        self._note_all(self._stream.take(self._collector.collect(0.0)))
        self._options.progress(self._snapshot())
        if self._stopped_by:
            raise Stopped(self._stopped_by)
        return self._options.stop()

    @property
    def exhausted(self) -> bool:
        """As `JobSource.exhausted`."""
        return self._feed.exhausted

    def take(self, maximum: int, wait_s: float) -> list[NewJob[Record]]:
        """As `JobSource.take`; rows that cannot become jobs fail here."""
        jobs = []
        for row in self._feed.take(maximum, wait_s):
            if reason := row.reason if isinstance(row, Broken) else self._refuse(row):
                self._fail(row, INVALID_LINE, reason)
                continue
            assert isinstance(row, Record)
            task_id = self._journal.task_id(row.source, row.line)
            # The window holds no items, which may be large.
            itemless = replace(row, item=None)
            jobs.append(NewJob(task_id, row.item, row.item_count, itemless))
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

    def _to_be_sent(self, task_ids: Sequence[str]) -> Sequence[str]:
        missing = self._missing(task_ids)
        self._submitted += len(missing)
        return missing

    def _note_all(self, ended: Iterable[tuple[str, Record, Answer]]) -> None:
        for task_id, row, answer in ended:
            if self._note(task_id, row, answer):
                self._stream.discard(task_id)
        if self._stream.flush_is_due:
            self._flush()

    def _note(self, task_id: str, row: Record, answer: Answer) -> bool:
        """Adds an answer to the output; returns whether the backend may remove it."""
        if answer.batch_size:
            self._batched += 1
            self._batched_items += answer.batch_size
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
        return True

    def _fail(self, row: Record | Broken, type_: str, message: str) -> None:
        self._failed += 1
        self._output.failure(row, type_, message)
        where = self._output.line_name(row)
        self._kinds[type_] += 1
        self._first_failure = self._first_failure or f"{where}: {type_}: {message}"
        if self._options.stop_at_failure and not self._stopped_by:
            self._stopped_by = f"stopped at {where}: {type_}: {message}"

    def _flush(self) -> None:
        """Writes results before the backend removes them, so that none is lost."""
        self._output.flush()
        self._stream.flush()

    def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        done = self._succeeded + self._failed
        total = self._dataset.total
        if total is not None:
            total = max(total - len(self._output.done), 0)
        return Snapshot(
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            now_s - self._began_s,
            self._rate.per_second(now_s, done),
            total,
            self._batched_items / max(self._batched, 1),
            dict(self._kinds.most_common()),
        )


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
    try:
        run, rows = begin_run(app, dataset, task, options)
    except Interrupted:
        return Summary(Ending.INTERRUPTED, 0, 0, 0, 0, 0.0, "", "interrupted")
    settings = {
        "kwargs": dict(options.keywords or {}),
        **dataset.settings,
        "ordered": options.ordered,
    }
    options.began(dataset.description)
    with files:
        files.open(Journal.of(dataset.sources, run.task, settings, options.window))
        if files.is_resumed and not files.is_begun and files.results.path is not None:
            written_s = files.results.path.stat().st_mtime
            for path in (each for each in dataset.inputs if each.stat().st_mtime > written_s):
                options.notice(
                    f"{path}: has changed since {output} was complete, so results may be of other"
                    " rows; --overwrite computes all of them anew"
                )
        try:
            summary = run.run(files.missing(rows), files)
        except DatasetError as error:
            hint = "; --resume goes on from here" if files.is_begun else ""
            raise DatasetError(f"{error}{hint}") from error
    return summary


def begin_run(
    app: Celery, dataset: Dataset, task: str | None, options: SubmitOptions
) -> tuple[FileRun, Iterator[Record | Broken]]:
    """A run, and all rows, of which the first ones were read; arguments and errors of `FileRun`."""
    rows = None
    if task is None and dataset.is_openai and not dataset.model:
        # Of a pipe, which is read once: its first rows say what the task is.
        dataset.is_own_name = cache(lambda name: find_task(app, name, options.queue) == name)
        rows = begin_reading(dataset, options.stop)
    run = FileRun(app, dataset, task, options)
    return run, rows or begin_reading(dataset, options.stop)


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
            " name their model themselves; in a pipe they need --format openai"
        )
    return dataset.model
