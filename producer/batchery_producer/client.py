"""The client: a data set through a task, in a few lines.

Everything that it sends is a stock Celery message, and every result a stock Celery result.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any, Self

from celery import Celery
from celery.result import AsyncResult

from batchery_producer.publishing.publisher import is_known
from batchery_producer.results.answers import Outcome, check_per_job
from batchery_producer.stream import WINDOW, Progress, Stream


class Client:
    """Calls tasks by name, one by one or many at once."""

    def __init__(self, app: Celery | str) -> None:
        """Connects when it is used first.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app need
                not have the tasks.
        """
        self._owns_app = isinstance(app, str)
        self.app = make_app(app)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def task(self, name: str, **options: Any) -> "TaskClient":
        """A task by name.

        Args:
            name: Of the task; a model's is its name in the settings.
            options: Of `apply_async`, for all its jobs: `queue`, `priority`, `expires`, `headers`.
                By default jobs go where the app routes them, else to a queue of the task's name.
        """
        return TaskClient(self.app, name, options)

    def close(self) -> None:
        """Closes the app that it has made of a URL."""
        if self._owns_app:
            close_app(self.app)


class TaskClient:
    """A task, for callers that have many items."""

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
            Exception: The error of the first item that failed. The jobs that were not begun by then
                are revoked.
        """
        with closing(self._stream(items, ordered=ordered, **settings)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.value

    def as_completed(
        self, items: Iterable[Any], *, ordered: bool = False, **settings: Any
    ) -> Generator[Outcome, None, None]:
        """Yields an `Outcome` for each item, with its index: one item that fails stops nothing.

        Memory does not grow with the number of items: no more than `window` of them are in flight.
        When the iterator is closed before its end, jobs that were not begun are revoked.

        Args:
            items: Read as there is room for them.
            ordered: In the order of the items, or as they are done.
            settings: As follows.
            keywords: Keyword arguments of all jobs; a mapping.
            per_job: Items in one message. A worker forms its batches of items, whatever messages
                they came in; many items in each are less work for all but the device.
            window: Most items in flight.
            timeout_s: Give up when no result has come for so long, in seconds; by default never.
            keep_results: Leave results in the backend, until they expire.
            progress: Called several times a second, with a `Progress`.

        Raises:
            NoResult: None came for `timeout_s`.
            GaveUp: Redis stays away for two minutes.
            BatchArgumentError: A number is out of range.
            EncodeError: kombu's, for an item that cannot be serialized.
        """
        return self._stream(items, ordered=ordered, **settings)

    def _stream(
        self,
        items: Iterable[Any],
        *,
        ordered: bool,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
        keep_results: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> Generator[Outcome, None, None]:
        size = check_per_job(per_job)
        return Stream(
            self._app,
            self.name,
            items,
            keywords=keywords or {},
            options=self._options,
            per_job=size,
            window=max(window, size),
            ordered=ordered,
            timeout_s=timeout_s,
            keep_results=keep_results,
            progress=progress,
        ).run()


def make_app(app: Celery | str) -> Celery:
    """The app itself, or one for a Redis at a URL."""
    if isinstance(app, Celery):
        return app
    return Celery("client", broker=app, backend=app, set_as_current=False)


def close_app(app: Any) -> None:
    """Closes the connections that an app of ours has opened."""
    backend: Any = app.backend
    if getattr(backend, "result_consumer", None) is not None:
        backend.result_consumer.stop()
    if "client" in vars(backend):
        backend.client.close()
    app.close()
