"""The client: sends a data set through a task in a few lines.

Its messages are stock Celery messages, and the results are stock Celery results.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple, Self

from celery import Celery, uuid
from celery.result import AsyncResult
from celery.utils.functional import chunks

from batchery.errors import BatchArgumentError, BatcheryError, NoResult
from batchery.protocol.headers import STREAMED, sent_now, with_tenant
from batchery.retry import RetryPolicy
from batchery.task import check_options
from batchery.valkey import use_redis
from batchery_producer.answers import (
    Answer,
    Outcome,
    check_per_job,
    read_answer,
    read_outcomes,
)
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import collector_for
from batchery_producer.diagnosis import explain_stall
from batchery_producer.piece_reader import PieceReader, reader_for
from batchery_producer.piece_stream import PieceStream
from batchery_producer.publisher import Publisher, route_unknown
from batchery_producer.stream import SLOW_INPUT_S, NewJob, Stream, Window
from batchery_producer.template import uuids

#: Items in flight: some batches for each of several devices, and still little memory.
WINDOW = 8192


class Progress(NamedTuple):
    """How far a stream is, in items."""

    sent: int
    done: int
    failed: int


class Client:
    """Calls tasks by name, one by one or many at once."""

    def __init__(self, app: Celery | str) -> None:
        """Connects at its first use.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app does
                not need to have the tasks.
        """
        self._owns_app = isinstance(app, str)
        self.app = make_app(app)
        self._reader: PieceReader | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def task(self, name: str, *, tenant: str | None = None, **options: Any) -> "TaskClient":
        """A task by name.

        Args:
            name: Name of the task; of a model, its name in the settings.
            tenant: For whom the jobs run. Tenants of one priority class have equal shares of it.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`. By default jobs go where the app routes them, or to a queue of the task's
                name.

        Raises:
            InvalidItem: The tenant is no name.
            BatchArgumentError: There is no such option.
        """
        check_options(f"{name}: Client.task", options, self.app.tasks.get(name), ("tenant",))
        return TaskClient(self.app, name, with_tenant(options, tenant), self._open_reader)

    def follow(
        self, job_id: str, after: str | None = None, *, timeout_s: float | None = None
    ) -> PieceStream:
        """The partial results of a job that was sent by `stream`, here or elsewhere.

        While anybody reads them, the job goes on.

        Args:
            job_id: Id of the job.
            after: `last_id` of an earlier reader, which is read on from there; None for all.
            timeout_s: How long to wait for each, in seconds; None for ever.

        Reading it raises `UnknownJob` where there is neither a stream of this job nor a result.

        Raises:
            BatchArgumentError: `after` is no such id.
            SettingsError: The app's result backend is no Redis.
        """
        reader = self._open_reader()
        stream = PieceStream(reader, job_id, after=after, timeout_s=timeout_s)
        reader.follow(stream)
        reader.wake()
        return stream

    def _open_reader(self) -> PieceReader:
        if self._reader is None:
            self._reader = PieceReader(self.app)
        return self._reader

    def close(self) -> None:
        """Ends the streams that are still read, and closes the app that was made for a URL."""
        if self._reader is not None:
            self._reader.close()
        if self._owns_app:
            close_app(self.app)


class TaskClient:
    """A task that is called with many items."""

    def __init__(
        self,
        app: Celery,
        name: str,
        options: Mapping[str, Any],
        open_reader: Callable[[], PieceReader],
    ) -> None:
        self._app = app
        self.name = name
        self._options = dict(options)
        self._open_reader = open_reader

    def delay(self, item: Any, **keywords: Any) -> AsyncResult[Any]:
        """Sends one job, as Celery does; returns its result.

        Raises:
            BatchArgumentError: The keywords are given as those of many jobs.
        """
        check_keywords(self.name, keywords)
        return self._send(item, keywords, self._options)

    def stream(self, item: Any, *, timeout_s: float | None = None, **keywords: Any) -> PieceStream:
        """Sends one job, and yields its partial results while it runs; then it has the `result`.

        Args:
            item: The item.
            timeout_s: How long to wait for each partial result, in seconds; None for ever.
            keywords: Keyword arguments of the job.

        Raises:
            SettingsError: The app's result backend is no Redis.
            GaveUp: Redis stays away for `timeout_s`, or for two minutes.
            Exception: What `delay` raises.
        """
        check_keywords(self.name, keywords)
        app, name, options = self._app, self.name, self._options
        if app.conf.task_always_eager and name in app.tasks:
            ended = self.delay(item, **keywords)
            stream = PieceStream(None, ended.id)
            stream.give([read_answer(ended.state, ended.result) or Answer()])
            return stream
        task_id, reader = uuid(), self._open_reader()

        def cancel() -> None:
            with suppress(Exception):  # Nobody waits for it, and it ends after the grace time.
                app.control.revoke(task_id)
                reader.give_up([task_id])

        explain = partial(explain_stall, app, name, options)
        stream = PieceStream(reader, task_id, timeout_s=timeout_s, cancel=cancel, explain=explain)
        reader.open([stream], timeout_s)
        headers = {**(options.get("headers") or {}), **STREAMED}
        try:
            self._send(item, keywords, {**options, "task_id": task_id, "headers": headers})
        except BaseException:
            stream.close()
            reader.forget([stream])
            raise
        return stream

    def _send(
        self, item: Any, keywords: dict[str, Any], given: Mapping[str, Any]
    ) -> AsyncResult[Any]:
        options = route_unknown(self._app, self.name, given)
        options["headers"] = {**(options.get("headers") or {}), **sent_now()}
        known: Any = self._app.tasks.get(self.name)
        if known is None:
            return self._app.send_task(self.name, (item,), keywords, **options)
        result: AsyncResult[Any] = known.apply_async((item,), keywords, **options)
        return result

    def map(
        self, items: Iterable[Any], *, ordered: bool = True, **settings: Any
    ) -> Generator[Any, None, None]:
        """Yields the result of each item; the arguments are those of `as_completed`.

        Raises:
            Exception: The error of the first item that failed. Jobs that no worker has begun are
                then revoked.
        """
        with closing(self.as_completed(items, ordered=ordered, **settings)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.value

    def as_completed(
        self,
        items: Iterable[Any],
        *,
        ordered: bool = False,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
        keep_results: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Generator[Outcome, None, None]:
        """Yields an `Outcome` with the index of each item. A failed item does not stop the others.

        Memory does not grow with the number of items: no more than `window` of them are in flight.
        When the iterator is closed before its end, jobs that were not begun are revoked.

        Args:
            items: Are read as the window has space for them; meanwhile no outcome is yielded.
            ordered: Whether outcomes come in the order of the items, or as they are done.
            keywords: Keyword arguments of all jobs.
            per_job: Number of items in one message. Workers form batches of items, whatever
                messages they came in; larger messages mean less work for all but the device.
            window: Maximum number of items in flight.
            timeout_s: Give up when no result has come for so long, in seconds; by default never.
                It bounds sending, waiting and cleaning up together.
            keep_results: Leave results in the backend, until they expire.
            progress: Called several times a second, with a `Progress`.

        Raises:
            NoResult: None came for `timeout_s`.
            GaveUp: Redis stays away for `timeout_s`, or for two minutes.
            QueueFull: The class of the jobs has had no room for `timeout_s`.
            BrokerRefused: Redis takes no jobs for this queue, or not from this user.
            BatchArgumentError: A number is out of range.
            EncodeError: kombu's, for an item that cannot be serialized.
            InvalidItem: For one whose message is larger than a worker reads.
            Exception: What reading the items raised, after the outcomes of those before.
        """
        app, size = self._app, check_per_job(per_job)
        # One for all: once Redis stays away, nothing else waits for it, and nothing can be revoked.
        retries = RetryPolicy.within(timeout_s)
        broker = BrokerConnection(app, retries, persistent=True)
        options = {**self._options, "keywords": keywords, "wait_s": timeout_s}
        publisher = Publisher(app, self.name, broker=broker, **options)
        source = ItemSource(items, size)
        stream = Stream(
            collector_for(app, retries),
            Window[str, range, Answer](max(window // (size or 1), 1), ordered=ordered),
            source,
            publisher,
            keep_results=keep_results,
            timeout_s=timeout_s,
            explain=partial(explain_stall, app, self.name, self._options),
        )
        return self._outcomes(stream, source, broker, progress)

    def _outcomes(
        self,
        stream: Stream[range],
        source: "ItemSource",
        broker: BrokerConnection,
        progress: Callable[[Progress], None],
    ) -> Generator[Outcome, None, None]:
        done = failed = 0
        try:
            while not stream.is_done:
                for task_id, indexes, answer in stream.step():
                    stream.discard(task_id)
                    are_many = source.per_job > 0
                    for outcome in read_outcomes(answer, indexes, are_many, self._app.backend):
                        done += 1
                        failed += outcome.error is not None
                        yield outcome
                if stream.flush_is_due:
                    stream.flush()
                progress(Progress(source.taken, done, failed))
                if over := stream.stalled():
                    raise NoResult(over)
            if source.error is not None:
                raise source.error
        finally:
            if not broker.retries.is_spent:
                with suppress(BatcheryError, OSError):
                    stream.flush()
                    broker.revoke(stream.sent)
            stream.collector.close()
            broker.close()


class ItemSource:
    """Makes jobs of items, as they are needed.

    Attributes:
        per_job: Items in one job; 0 if each item is a job of its own and not in a list.
        taken: Number of items that are in jobs so far.
        exhausted: Whether there are no more.
        error: What reading the next item raised, if it did; those before it become jobs.
    """

    def __init__(self, items: Iterable[Any], per_job: int) -> None:
        self.per_job = per_job
        self.taken = 0
        self.exhausted = False
        self.error: Exception | None = None
        read = self._read(iter(items))
        self._arguments = chunks(read, per_job) if per_job else read

    def _read(self, items: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from items
        except Exception as error:  # noqa: BLE001 (raised again when all before it have ended)
            self.error = error

    def take(self, maximum: int, _wait_s: float) -> Sequence[NewJob[range]]:
        """As `JobSource.take`."""
        arguments: list[Any] = []
        end_s = time.monotonic() + SLOW_INPUT_S
        for argument in self._arguments:
            arguments.append(argument)
            # What was read of a slow input is sent, and answers are looked for.
            if len(arguments) >= maximum or time.monotonic() > end_s:
                break
        else:
            self.exhausted = True
        jobs = []
        for task_id, argument in zip(uuids(len(arguments)), arguments, strict=True):
            count = len(argument) if self.per_job else 0
            indexes = range(self.taken, self.taken + (count or 1))
            self.taken = indexes.stop
            jobs.append(NewJob(task_id, argument, count, indexes))
        return jobs


def check_keywords(task: str, keywords: Mapping[str, Any]) -> None:
    """Checks the keywords of one job, which are given as they are.

    Raises:
        BatchArgumentError: They are given as `map` and `submit_many` take them.
    """
    if isinstance(known := keywords.get("keywords"), Mapping):
        plain = ", ".join(f"{name}={value!r:.40}" for name, value in known.items()) or "name=value"
        raise BatchArgumentError(
            f"{task}: keywords={{...}} is for many jobs (map, as_completed, submit_many);"
            f" one job takes them as they are: {plain}"
        )


def stream_job(task: Any, item: Any, timeout_s: float | None, keywords: Any) -> PieceStream:
    """`BatchTask.stream`."""
    client = TaskClient(task.app, task.name, {}, partial(reader_for, task.app))
    return client.stream(item, timeout_s=timeout_s, **keywords)


def make_app(app: Celery | str) -> Celery:
    """The app itself, or one for a Redis at a URL.

    Raises:
        SettingsError: It is no URL.
    """
    if isinstance(app, Celery):
        return app
    made = Celery("client", set_as_current=False)
    use_redis(made, app)
    return made


def close_app(app: Any) -> None:
    """Closes the connections of an app that `make_app` made."""
    backend: Any = app.backend
    if getattr(backend, "result_consumer", None) is not None:
        backend.result_consumer.stop()
    if "client" in vars(backend):
        backend.client.close()
    app.close()
