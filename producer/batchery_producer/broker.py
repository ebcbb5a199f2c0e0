"""The publishers' connections to Redis: each chunk of messages goes into a list there once.

One reconnects when it breaks, and may send a chunk again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import redis
from celery import Celery, uuid
from celery.utils.functional import chunks
from kombu import Connection, exceptions
from kombu.transport import redis as kombu_redis

from batchery.errors import BrokerRefused
from batchery.redis_scripts import RedisScripts
from batchery.retry import LASTING_REFUSALS, RetryPolicy, explain_refusal, find_refusal
from batchery.settings import LOWEST_PRIORITY
from batchery.shards import Shard, list_shards, shard_of
from batchery.task import BatchTask
from batchery.transport.redis_schema import lists_of

LUA = Path(__file__).parent / "lua"

#: How long Redis remembers a chunk, in seconds: longer than any client retries.
MARKER_S = 600

T = TypeVar("T")

#: Number of task ids that one message to the workers revokes.
REVOKE_CHUNK = 1000


#: Name of a Redis command, and its arguments; keys lack kombu's prefix.
Command = tuple[str, tuple[Any, ...]]


class Room(NamedTuple):
    """How many messages may be in a queue."""

    queue: str
    #: Maximum number of them; 0 is no limit.
    max_waiting: int = 0
    #: Those that count.
    priorities: range = range(LOWEST_PRIORITY + 1)


class RecordedCommands:
    """What a producer would have sent; takes the place of kombu's batch in it.

    So Celery itself does everything that it does for a message: routing, options of the task,
    stamps, signals, declaration of the queue.

    Attributes:
        pushed: Messages by the key of their list, in order.
        others: Other commands, each once.
    """

    def __init__(self) -> None:
        self.pushed: dict[str, Any] = {}
        self.others: dict[Command, None] = {}

    def publish(self, channel: Any, message: Any, **options: Any) -> Any:
        """Called by kombu's producer for each message."""
        return channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, name: str, *args: Any) -> None:
        """Called by kombu's channel for each command."""
        if name == "lpush":
            self.pushed.setdefault(args[0], []).append(args[1])
        else:
            self.others[name, args] = None


class BrokerConnection:
    """Connects at its first use. Not for use by several threads at once."""

    def __init__(
        self,
        app: Celery,
        retries: RetryPolicy,
        *,
        persistent: bool = False,
        shard: Shard | None = None,
    ) -> None:
        """Prepares.

        Args:
            app: App whose broker it connects to.
            retries: How long to retry when the broker is away.
            persistent: Whether to retry, too, when the broker takes no jobs for now.
            shard: What it connects to in place of the broker.
        """
        self.app = app
        self.retries = retries
        self._persistent = persistent
        self._shard = shard or Shard()
        #: Those to shards that are no broker, which are closed with this one.
        self._apart: dict[Shard, BrokerConnection] = {}
        self._connection: Connection | None = None
        self._producer: Any = None
        self._redis: Any = None
        #: Chunks are numbered; under the marker, Redis remembers the number of the last one.
        self._marker, self._marker_pid = "", 0
        self._chunk = 0

    def find_for(self, task: str, queue: str) -> "BrokerConnection":
        """The connection for jobs of a task: this one, or that to the shard of their queue."""
        shard = shard_of(self.app, queue)
        if not shard.is_apart:
            return self
        known = self.app.tasks.get(task)
        # One that the app does not know is called by its name, as models are.
        if known is not None and not isinstance(known, BatchTask):
            return self
        if shard not in self._apart:
            self._apart[shard] = BrokerConnection(
                self.app, self.retries, persistent=self._persistent, shard=shard
            )
        return self._apart[shard]

    @property
    def producer(self) -> Any:
        """A kombu producer."""
        if self._producer is None:
            self._connect()
        return self._producer

    @property
    def channel(self) -> Any:
        """The kombu channel of the producer."""
        return self.producer.channel

    @property
    def is_redis(self) -> bool:
        """Whether the broker is a Redis, to which jobs can be pushed."""
        return isinstance(self.channel, kombu_redis.Channel)

    @contextmanager
    def recording(self) -> Iterator[RecordedCommands]:
        """Records, within the block, what this thread publishes with the producer; for Redis."""
        batches, recording = self.producer._batch_local, RecordedCommands()
        batches.current = recording
        try:
            yield recording
        finally:
            del batches.current

    def call(self, function: Callable[[], T], queue: str, retries: RetryPolicy | None = None) -> T:
        """Calls a function that sends something, until it works.

        Args:
            function: Must be safe to repeat, whatever it did before it failed.
            queue: Name of the queue, for error messages.
            retries: How long to retry in place of how long this connection does.

        Raises:
            BrokerRefused: The broker refuses the command.
            Interrupted: The caller asked to stop.
            GaveUp: The broker stays away.
        """

        def attempt() -> T | BrokerRefused:
            try:
                return function()
            except Exception as error:
                # kombu wraps the error of Redis.
                cause = error.__cause__ or error
                refused = explain_refusal(cause, queue)
                if refused is not None and find_refusal(cause) in LASTING_REFUSALS:
                    return refused  # Not raised, as another attempt would be refused, too.
                raise refused or error from error

        answer = (retries or self.retries).call(attempt, self._errors(), self._disconnect)
        if isinstance(answer, BrokerRefused):
            raise answer
        return answer

    def next_chunk(self) -> int:
        """Number of a new chunk, which may be pushed again until there is another."""
        if self._marker_pid != os.getpid():
            # With the marker of its parent, a forked process would seem to repeat chunks.
            self._marker, self._marker_pid = f"batchery:publisher:{uuid()}", os.getpid()
        self._chunk += 1
        return self._chunk

    def push(self, chunk: int, key: str, messages: Sequence[str], room: Room) -> tuple[int, int]:
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
            redis.ResponseError: Redis refuses, and nothing was pushed: see `explain_refusal`.
            redis.RedisError: It is unknown whether the chunk was pushed.
        """
        channel, keys = self.channel, [self._marker, key]
        if room.max_waiting:
            lists = lists_of(channel, room.queue, room.priorities)
            keys += [each for each in lists if each != key]
        keys = [channel.global_keyprefix + each for each in keys]
        words = (chunk, MARKER_S, room.max_waiting, *messages)
        pushed, length = RedisScripts(self._redis, LUA).run("push", keys, *words)
        return int(pushed), int(length)

    def run(self, commands: Iterable[Command]) -> None:
        """Runs other commands in one pipeline."""
        with self.channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for name, args in commands:
                getattr(pipe, name)(*args)
            pipe.execute()

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Tells the workers not to begin these jobs; for the connection to the app's broker."""
        control: Any = self.app.control

        def revoke(some: Sequence[str]) -> None:
            control.revoke(some, connection=self.producer.connection)

        # A broker that is away must not hold up jobs that are elsewhere.
        retries = RetryPolicy(away_s=0) if list_shards(self.app)[0].is_apart else None
        for some in chunks(iter(task_ids), REVOKE_CHUNK):
            self.call(partial(revoke, some), "celery.pidbox", retries)

    def close(self) -> None:
        """Closes the connection; the next use opens another one."""
        for each in self._apart.values():
            each.close()
        with suppress(Exception):  # The marker expires.
            is_marked = self._marker_pid == os.getpid() and not self.retries.is_spent
            if self._producer is not None and is_marked:
                self._redis.unlink(self.channel.global_keyprefix + self._marker)
        self._disconnect()

    def _errors(self) -> tuple[type[BaseException], ...]:
        connection = self._connection or self._shard.connect(self.app, writes=True)
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
        connection = self._connection = self._shard.connect(self.app, writes=True)
        transport: Any = connection.get_transport_cls()
        if self.retries.command_s is not None and issubclass(transport, kombu_redis.Transport):
            options: Any = connection.transport_options
            for name in ("socket_timeout", "socket_connect_timeout"):
                options[name] = self.retries.shorten(options.get(name))
        # We retry ourselves, as kombu's own pauses are seconds long.
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        channel: Any = connection.default_channel
        if isinstance(channel, kombu_redis.Channel):
            # Not kombu's own client, which adds its key prefix only to a script's first key.
            self._redis = redis.Redis(connection_pool=channel.pool)
        self._producer = self.app.amqp.Producer(channel, auto_declare=False)

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # It may be dead, in any of its transport's ways.
                connection.release()
