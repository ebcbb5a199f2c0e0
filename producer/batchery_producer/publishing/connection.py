"""The publishers' connection to the broker, which reconnects when it breaks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import redis
from celery import Celery
from celery.utils.functional import chunks
from kombu import Connection, exceptions
from kombu.transport import redis as kombu_redis

from batchery.errors import BrokerRefused
from batchery_producer.publishing.redis_push import CommandRecorder, Pusher, refused
from batchery_producer.retry import RetryPolicy

T = TypeVar("T")

#: Number of task ids that one message to the workers revokes.
REVOKE_CHUNK = 1000


class BrokerConnection:
    """Connects at its first use. Not for use by several threads at once."""

    def __init__(self, app: Celery, retries: RetryPolicy, *, persistent: bool = False) -> None:
        """Prepares.

        Args:
            app: App whose broker it connects to.
            retries: How long to retry when the broker is away.
            persistent: Whether to retry, too, when the broker refuses jobs.
        """
        self.app = app
        self.retries = retries
        self._persistent = persistent
        self._connection: Connection | None = None
        self._producer: Any = None
        self._recording: CommandRecorder | None = None
        self._pusher = Pusher()

    @property
    def producer(self) -> Any:
        """A kombu producer."""
        if self._producer is None:
            self._connect()
        return self._producer

    @property
    def recording(self) -> CommandRecorder | None:
        """Records what the producer would send; None if the broker is not Redis."""
        return self._recording if self.producer else None

    @property
    def pusher(self) -> Pusher:
        """Pushes what was recorded."""
        if self._producer is None:
            self._connect()
        return self._pusher

    def call(self, function: Callable[[], T], queue: str) -> T:
        """Calls a function that sends something, until it works.

        Args:
            function: Must be safe to repeat, whatever it did before it failed.
            queue: Name of the queue, for error messages.

        Raises:
            BrokerRefused: The broker refuses the command.
            Interrupted: The caller asked to stop.
            GaveUp: The broker stays away.
        """

        def attempt() -> T:
            try:
                return function()
            except Exception as error:
                # kombu wraps the error of Redis.
                raise refused(error.__cause__ or error, queue) or error from error

        return self.retries.call(attempt, self._errors(), self._disconnect)

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Tells the workers not to begin these jobs."""
        control: Any = self.app.control
        for some in chunks(iter(task_ids), REVOKE_CHUNK):
            self.call(partial(self._broadcast, control.revoke, some), "celery.pidbox")

    def close(self) -> None:
        """Closes the connection; the next use opens another one."""
        with suppress(Exception):  # The marker expires.
            if not self.retries.is_spent:
                self._pusher.forget()
        self._disconnect()

    def _broadcast(self, command: Callable[..., Any], task_ids: Sequence[str]) -> None:
        command(task_ids, connection=self.producer.connection)

    def _errors(self) -> tuple[type[BaseException], ...]:
        connection = self._connection or self.app.connection_for_write()
        return (
            *connection.recoverable_connection_errors,
            *connection.recoverable_channel_errors,
            exceptions.BatchPublishError,  # type: ignore[attr-defined]  # New in kombu 5.7.
            exceptions.OperationalError,
            redis.ConnectionError,
            redis.TimeoutError,
            *((BrokerRefused,) if self._persistent else ()),
        )

    def _connect(self) -> None:
        connection = self._connection = self.app.connection_for_write()
        transport: Any = connection.get_transport_cls()
        if self.retries.command_s is not None and issubclass(transport, kombu_redis.Transport):
            options: Any = connection.transport_options
            for name in ("socket_timeout", "socket_connect_timeout"):
                options[name] = self.retries.shorten(options.get(name))
        # We retry ourselves, as kombu's own pauses are seconds long.
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        producer: Any = self.app.amqp.Producer(connection, auto_declare=False)
        channel: Any = connection.default_channel
        if isinstance(channel, kombu_redis.Channel):
            self._recording = CommandRecorder(producer)
            self._pusher.use(channel)
        self._producer = producer

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._recording = None
        if connection is not None:
            with suppress(Exception):  # It may be dead, in any of its transport's ways.
                connection.release()
