"""The client: sends a data set through a task in a few lines.

Its messages are stock Celery messages, and the results are stock Celery results.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, Self, Unpack

from celery import Celery, uuid
from celery.result import AsyncResult

from batchery.cluster_backend import use_cluster_results
from batchery.errors import BatchArgumentError
from batchery.installation import use_redis
from batchery.protocol.headers import STREAMED, sent_now, with_tenant
from batchery.task import check_options
from batchery_producer.answers import Answer, Outcome, read_answer
from batchery_producer.diagnosis import explain_stall
from batchery_producer.piece_reader import PieceReader, reader_for
from batchery_producer.piece_stream import PieceStream
from batchery_producer.publisher import route_unknown, send_one
from batchery_producer.stream import ItemOptions, ItemRun


class Client:
    """Calls tasks by name, one by one or many at once."""

    def __init__(self, app: Celery | str) -> None:
        """Connects at its first use.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app does
                not need to have the tasks. With the URL of a cluster, batch tasks can be called;
                jobs are revoked by the broker that CELERY_BROKER_URL names, or not at all.
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
        return send_one(self._app, self.name, (item,), keywords, **options)

    def map(
        self, items: Iterable[Any], *, ordered: bool = True, **options: Unpack[ItemOptions]
    ) -> Generator[Any, None, None]:
        """Yields the result of each item; the arguments are those of `as_completed`.

        Raises:
            Exception: The error of the first item that failed. Jobs that no worker has begun are
                then revoked.
        """
        with closing(self.as_completed(items, ordered=ordered, **options)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.value

    def as_completed(
        self, items: Iterable[Any], *, ordered: bool = False, **options: Unpack[ItemOptions]
    ) -> Generator[Outcome, None, None]:
        """Yields an `Outcome` with the index of each item. A failed item does not stop the others.

        Memory does not grow with the number of items: no more than `window` of them are in flight.
        When the iterator is closed before its end, jobs that were not begun are revoked.

        Args:
            items: Are read as the window has space for them; meanwhile no outcome is yielded.
            ordered: Whether outcomes come in the order of the items, or as they are done.
            options: As `ItemOptions` has them.

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
        run = ItemRun(self._app, self.name, self._options, items, ordered=ordered, **options)
        return run.outcomes()


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
    # Beside a cluster there may be no broker at all, which must not be waited for.
    made = Celery("client", broker="memory://", set_as_current=False)
    use_cluster_results(made)
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
