"""Publishing: how jobs are sent, many at a time and with no subscription for each."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import QueueNotFound
from kombu import Connection, exceptions

from batchery.errors import SettingsError
from batchery_producer.patience import Patience


class Publisher:
    """Sends jobs of one task to one queue, as stock Celery messages.

    Delivery is at least once: a chunk whose reply was lost is sent again under the same task ids.
    A job that then runs twice has one result.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        *,
        queue: str | None = None,
        keywords: Mapping[str, Any] | None = None,
        expires_s: float | None = None,
        patience: Patience,
    ) -> None:
        """Settles where the jobs go; connects when the first one is sent.

        Args:
            app: Its broker, routes and options of the task apply.
            task: Name of the task; it need not be registered with the app.
            queue: By default what the app says of the task; if it says nothing, the task's name.
            keywords: Keyword arguments of all jobs.
            expires_s: A job that no worker has taken by then, in seconds, is not run.
            patience: For a broker that goes away.

        Raises:
            SettingsError: The app does not allow this queue.
        """
        self._app = app
        self._task = task
        self._keywords = dict(keywords or {})
        self._options: dict[str, Any] = {}
        if queue is None and not _is_known(app, task):
            queue = task
        if queue is not None:
            self._options["queue"] = queue
        if expires_s is not None:
            self._options["expires"] = expires_s
        #: Name of the queue.
        self.queue = _queue_name(app, task, queue)
        if isinstance(app.backend, RedisBackend):
            # To send_task a job whose result nobody wants needs no subscription. The header, which
            # is all that the worker sees, says that somebody does.
            self._options |= {"ignore_result": True, "headers": {"ignore_result": False}}
        self._patience = patience
        self._connection: Connection | None = None
        self._producer: Any = None  # A kombu Producer; its types do not know `batch` yet.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disconnect()

    def send(self, jobs: Sequence[tuple[str, Any]]) -> None:
        """Sends jobs, each a task id and an item.

        Raises:
            Interrupted: The patience was asked to stop; some of the jobs may have been sent.
            GaveUp: The broker stays away; some of the jobs may have been sent.
        """
        self._patience.call(lambda: self._send(jobs), self._errors(), self._disconnect)

    def _send(self, jobs: Sequence[tuple[str, Any]]) -> None:
        producer = self._producer or self._connect()
        with producer.batch(max_size=len(jobs)):
            for task_id, item in jobs:
                self._app.send_task(
                    self._task,
                    (item,),
                    self._keywords,
                    task_id=task_id,
                    producer=producer,
                    # Only the whole batch can be repeated: its channel must not change on the way.
                    retry=False,
                    **self._options,
                )

    def _errors(self) -> tuple[type[BaseException], ...]:
        connection = self._connection or self._app.connection_for_write()
        return (
            *connection.recoverable_connection_errors,
            *connection.recoverable_channel_errors,
            exceptions.BatchPublishError,  # type: ignore[attr-defined]  # New in kombu 5.7.
            exceptions.OperationalError,
        )

    def _connect(self) -> Any:
        self._connection = self._app.connection_for_write()
        self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        return self._producer

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # It may be dead, in any of its transport's ways.
                connection.release()


def _is_known(app: Celery, task: str) -> bool:
    """Whether the app itself says something about where this task goes."""
    return task in app.tasks or app.amqp.router.lookup_route(task, (), {}, {}) is not None


def _queue_name(app: Celery, task: str, queue: str | None) -> str:
    known: Any = app.tasks.get(task)
    queue = queue or getattr(known, "model_queue", None) or getattr(known, "queue", None)
    try:
        route = app.amqp.router.route({"queue": queue} if queue else {}, task, (), {}, known)
    except QueueNotFound as error:
        raise SettingsError(
            f"queue {queue or task!r}: not among the app's task_queues, and the app creates no"
            " others (task_create_missing_queues); name one of its queues"
        ) from error
    destination = route.get("queue")
    return str(destination.name if destination is not None else route.get("routing_key", task))
