"""The client: sends a data set through a task in a few lines.

Its messages are stock Celery messages, and the results are stock Celery results.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import Any, NamedTuple, Self

from celery import Celery
from celery.result import AsyncResult
from celery.utils.functional import chunks

from batchery.errors import BatcheryError, NoResult
from batchery.protocol.headers import with_tenant
from batchery.retry import RetryPolicy
from batchery.valkey import given_redis_url
from batchery_producer.answers import Answer, Outcome, check_per_job, read_outcomes
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import collector_for
from batchery_producer.diagnosis import explain_stall
from batchery_producer.publisher import Publisher, is_known
from batchery_producer.stream import NewJob, Stream, Window
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
        """
        return TaskClient(self.app, name, with_tenant(options, tenant))

    def close(self) -> None:
        """Closes the app that was made for a URL."""
        if self._owns_app:
            close_app(self.app)


class TaskClient:
    """A task that is called with many items."""

    def __init__(self, app: Celery, name: str, options: Mapping[str, Any]) -> None:
        self._app = app
        self.name = name
        self._options = dict(options)

    def delay(self, item: Any, **keywords: Any) -> AsyncResult[Any]:
        """Sends one job, as Celery does; returns its result."""
        options = dict(self._options)
        if not is_known(self._app, self.name):
            options.setdefault("queue", self.name)
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
            items: Are read as the window has space for them.
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
            BatchArgumentError: A number is out of range.
            EncodeError: kombu's, for an item that cannot be serialized.
        """
        app, size = self._app, check_per_job(per_job)
        # One for all: once Redis stays away, nothing else waits for it, and nothing can be revoked.
        retries = RetryPolicy.within(timeout_s)
        broker = BrokerConnection(app, retries, persistent=True)
        publisher = Publisher(app, self.name, keywords=keywords, broker=broker, **self._options)
        source = ItemSource(items, size)
        stream = Stream(
            collector_for(app, retries),
            Window[str, range, Answer](max(window // (size or 1), 1), ordered=ordered),
            source,
            publisher,
            keep_results=keep_results,
            timeout_s=timeout_s,
            explain=lambda: explain_stall(app, self.name, publisher.queue),
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
    """

    def __init__(self, items: Iterable[Any], per_job: int) -> None:
        self.per_job = per_job
        self.taken = 0
        self.exhausted = False
        self._arguments = chunks(iter(items), per_job) if per_job else iter(items)

    def take(self, maximum: int, _wait_s: float) -> Sequence[NewJob[range]]:
        """As `JobSource.take`."""
        arguments = list(islice(self._arguments, maximum))
        self.exhausted = len(arguments) < maximum
        jobs = []
        for task_id, argument in zip(uuids(len(arguments)), arguments, strict=True):
            count = len(argument) if self.per_job else 0
            indexes = range(self.taken, self.taken + (count or 1))
            self.taken = indexes.stop
            jobs.append(NewJob(task_id, argument, count, indexes))
        return jobs


def make_app(app: Celery | str) -> Celery:
    """The app itself, or one for a Redis at a URL.

    Raises:
        SettingsError: It is no URL.
    """
    if isinstance(app, Celery):
        return app
    url = given_redis_url(app)
    return Celery("client", broker=url, backend=url, set_as_current=False)


def close_app(app: Any) -> None:
    """Closes the connections of an app that `make_app` made."""
    backend: Any = app.backend
    if getattr(backend, "result_consumer", None) is not None:
        backend.result_consumer.stop()
    if "client" in vars(backend):
        backend.client.close()
    app.close()
