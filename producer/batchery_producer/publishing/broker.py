"""The publishers' connection to the broker: each chunk of messages goes into a Redis list once.

It reconnects when it breaks, and may send a chunk again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import redis
from celery import Celery, uuid
from celery.backends.redis import RedisBackend
from celery.utils.functional import chunks
from kombu import Connection, exceptions
from kombu.transport import redis as kombu_redis

from batchery.errors import BrokerRefused
from batchery.retry import REFUSAL_MEANINGS, RetryPolicy, find_refusal
from batchery.settings import LOWEST_PRIORITY

PUSH_LUA = Path(__file__).parent / "lua" / "push.lua"

#: How long Redis remembers a chunk, in seconds: longer than any client retries.
MARKER_S = 600

T = TypeVar("T")

#: Number of task ids that one message to the workers revokes.
REVOKE_CHUNK = 1000


class Command(NamedTuple):
    """A Redis command; its keys lack kombu's key prefix."""

    name: str
    args: tuple[Any, ...]


class Room(NamedTuple):
    """How many messages may be in a queue."""

    queue: str
    #: Maximum number of them; 0 is no limit.
    max_waiting: int = 0
    #: Those that count.
    priorities: range = range(LOWEST_PRIORITY + 1)


NO_LIMIT = Room("")


class CommandRecorder:
    """Replaces kombu's batch in a producer, and records the commands.

    So Celery itself does everything that it does for a message: routing, options of the task,
    stamps, signals, declaration of the queue.
    """

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.commands: list[Command] = []

    @contextmanager
    def __call__(self) -> Iterator[list[Command]]:
        """Records, within the block, what this thread publishes with the producer."""
        self.commands = []
        current = self._producer._batch_local
        current.current = self
        try:
            yield self.commands
        finally:
            del current.current

    def publish(self, channel: Any, message: Any, **options: Any) -> Any:
        """Called by kombu's producer for each message."""
        return channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, name: str, *args: Any) -> None:
        """Called by kombu's channel for each command."""
        self.commands.append(Command(name, args))


def send_as_celery_does(
    app: Celery,
    task: str,
    job: tuple[str, Any],
    keywords: Mapping[str, Any],
    producer: Any,
    options: Mapping[str, Any],
) -> None:
    """Sends one job by Celery's own code, without a subscription to its result.

    Args:
        app: App whose tasks and settings apply.
        task: Name of the task; it need not be registered.
        job: Task id and item.
        keywords: Keyword arguments of the job.
        producer: A kombu producer.
        options: Options of `apply_async`.
    """
    task_id, item = job
    known: Any = app.tasks.get(task)
    options = {**options, "task_id": task_id, "producer": producer, "add_to_parent": False}
    if isinstance(app.backend, RedisBackend):
        # Celery subscribes to each result unless results are ignored. Workers read only the header,
        # which keeps the caller's choice.
        ignores_result = options.get("ignore_result", getattr(known, "ignore_result", None))
        headers = {**(options.get("headers") or {}), "ignore_result": ignores_result}
        options |= {"ignore_result": True, "headers": headers}
    if known is None:
        app.send_task(task, (item,), dict(keywords), **options)
    else:
        known.apply_async((item,), dict(keywords), **options)


def split(commands: Sequence[Command]) -> tuple[dict[str, list[str]], list[Command]]:
    """Separates the messages of each list, in order, from other commands, each once."""
    pushed: dict[str, list[str]] = {}
    others: dict[Command, None] = {}
    for command in commands:
        if command.name == "lpush":
            pushed.setdefault(command.args[0], []).append(command.args[1])
        else:
            others[command] = None
    return pushed, list(others)


class Pusher:
    """Pushes numbered chunks; Redis remembers the number of the last one."""

    def __init__(self) -> None:
        self._id = uuid()
        self._number = 0
        self._channel: Any = None
        self._client: Any = None
        self._script: Any = None

    def use(self, channel: Any) -> None:
        """Uses the connections of this kombu channel from now on."""
        self._channel = channel
        # Not kombu's own client, which adds its key prefix only to a script's first key.
        self._client = redis.Redis(connection_pool=channel.pool)
        self._script = self._client.register_script(PUSH_LUA.read_text())

    def next_chunk(self) -> int:
        """Number of a new chunk, which may be pushed again until there is another."""
        self._number += 1
        return self._number

    def push(
        self, chunk: int, key: str, messages: Sequence[str], room: Room = NO_LIMIT
    ) -> tuple[int, int]:
        """Pushes a chunk, unless it is in the list already.

        Args:
            chunk: Number of the chunk.
            key: Key of the list, without kombu's prefix.
            messages: Workers take the first one first.
            room: What may be in the queue with them.

        Returns:
            How many of the messages were pushed, and how many messages that count are in the queue
            now (0 if there is no limit).

        Raises:
            redis.ResponseError: Redis refuses, and nothing was pushed: see `refused`.
            redis.RedisError: It is unknown whether the chunk was pushed.
        """
        keys = [self._marker, key]
        if room.max_waiting:
            steps = [step for step in self._channel.priority_steps if step in room.priorities]
            lists = {self._channel._q_for_pri(room.queue, step) for step in steps}
            keys += sorted(lists - {key})
        prefix = self._channel.global_keyprefix
        pushed, length = self._script(
            keys=[prefix + each for each in keys],
            args=[chunk, MARKER_S, room.max_waiting, *messages],
        )
        return int(pushed), int(length)

    def run(self, commands: Sequence[Command]) -> None:
        """Runs other commands in one pipeline."""
        with self._channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for command in commands:
                getattr(pipe, command.name)(*command.args)
            pipe.execute()

    @property
    def _marker(self) -> str:
        return f"batchery:publisher:{self._id}"

    def forget(self) -> None:
        """Removes what Redis remembers, when no chunk will be sent again."""
        if self._client is not None and self._number:
            self._client.unlink(self._channel.global_keyprefix + self._marker)


def refused(error: BaseException, queue: str) -> BrokerRefused | None:
    """An error that explains Redis's refusal; None if the error is no refusal."""
    word = find_refusal(error) if isinstance(error, redis.ResponseError) else None
    if word is None:
        return None
    return BrokerRefused(f"queue {queue!r}: Redis {REFUSAL_MEANINGS[word]} ({error})")


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
