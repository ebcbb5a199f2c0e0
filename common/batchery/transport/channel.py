"""Kombu's Redis channels, with what devices, tenants and a full Redis need of them."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from queue import Empty
from time import time
from typing import Any

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps

from batchery.retry import find_refusal
from batchery.transport.cluster import list_tags, slot_options
from batchery.transport.outbox import OutboxChannel
from batchery.transport.redis_schema import (
    REPLIES_CLIENT,
    WORKER_CLIENT,
    later_sets,
    lists_of,
    tenant_lists,
    transport_scripts,
)

_QoS: Any = kombu_redis.QoS
_Channel: Any = object

logger = logging.getLogger("batchery.transport")

#: How long an answer of Redis may take, in seconds, unless a transport option says otherwise. The
#: event loop waits for it, and a connection may be dead without telling.
SOCKET_TIMEOUT_S = 10.0

#: Transport options in addition to kombu's; the last ones are for devices.
OPTIONS = ("lease_expiry_s",)


#: What is raised where what stands in a queue is no message: anybody can push anything.
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, RecursionError)


class QoS(_QoS):  # type: ignore[misc]
    """What kombu counts of the messages of ordinary tasks, also while Redis is full."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Counts a message."""
        try:
            super().append(message, delivery_tag)
        except redis.ResponseError as error:
            if find_refusal(error) != "OOM":
                raise
            # It is out of its queue already, and the error would end the worker.
            self._note_unacked(message, delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)

    def _note_unacked(self, message: Any, delivery_tag: str) -> None:
        """Notes a message as kombu does, while Redis is full."""
        prefix, info = self.channel.global_keyprefix, message.delivery_info
        raw = dumps([message._raw, info["exchange"], info["routing_key"]])
        scripts = transport_scripts(redis.Redis(connection_pool=self.channel.pool))
        keys = [f"{prefix}{self.unacked_key}", f"{prefix}{self.unacked_index_key}"]
        scripts.run("note_unacked", keys, delivery_tag, raw, time())

    def _remove_from_indices(self, delivery_tag: str, pipe: Any = None) -> Any:
        """Makes the commands that forget a message that is settled."""
        if pipe is None:
            # At maxmemory a transaction may not even free memory: its error would end the worker.
            with self.channel.conn_or_acquire() as client:
                pipe = client.pipeline(transaction=False)
        return super()._remove_from_indices(delivery_tag, pipe)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Gives back what workers have held for too long, if there is room for it."""
        try:
            super().restore_visible(*args, **kwargs)
        except redis.ResponseError as error:
            # At maxmemory kombu gets no lock, and the error would end the worker. It tries again.
            logger.debug("nothing is restored of what workers hold: %r", error)


class ConnectingChannel(_Channel):  # type: ignore[misc]
    """How a channel connects; mixed into kombu's Redis channels."""

    #: The client for single commands.
    _client_for_commands: Any = None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            # Kombu itself stumbles over that, with an error that ends Celery's worker.
            raise redis.ConnectionError("the channel is closed")
        params: dict[str, Any] = super()._connparams(asynchronous)
        if params.get("socket_timeout") is None:
            params["socket_timeout"] = SOCKET_TIMEOUT_S
        if asynchronous:
            params["protocol"] = 3  # Pushes need RESP3.
        return params

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        # Kombu makes a client for each command: 0.1 ms, a tenth of what `delay` and `get` cost.
        known = self._client_for_commands
        if known is None or known.connection_pool is not self.pool:
            known = self._client_for_commands = super()._create_client()
        return known

    def _make_separate_client(self, timeout_s: float) -> Any:
        """Makes a client with its own connection pool: it outlives the channel."""
        pool = self._get_pool()
        given = pool.connection_kwargs.get("socket_timeout") or timeout_s
        pool.connection_kwargs["socket_timeout"] = min(given, timeout_s)
        # Kombu's limit is 10, and all threads of a device may ask at once.
        pool.max_connections = max(pool.max_connections, 100)
        return redis.Redis(connection_pool=pool)


class FullRedisChannel(_Channel):  # type: ignore[misc]
    """What a worker needs to start and to consume while Redis is full; mixed into kombu's channels.

    A full Redis takes no command in a transaction, and no script, but those that free memory.
    """

    def _queue_bind(self, exchange: str, *args: Any) -> None:
        """Notes to which exchange a queue is bound."""
        if self.typeof(exchange).type == "fanout":
            # Redis's channels reach them, and nobody reads that table. It would keep the name of
            # each worker that was ever killed.
            routing_key, _, queue = args
            self._fanout_queues[queue] = (exchange, routing_key.replace("#", "*"))
            return
        with forgone_if_full():
            super()._queue_bind(exchange, *args)

    def _refresh_bindings(self, queues: Sequence[str]) -> None:
        """Notes the same once more."""
        with forgone_if_full():
            super()._refresh_bindings([each for each in queues if each not in self._fanout_queues])

    def _size(self, queue: str) -> int:
        """How many messages wait in a queue; without a transaction, unlike kombu."""
        with self.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for key in lists_of(self, queue):
                pipe.llen(key)
            return sum(length for length in pipe.execute() if isinstance(length, int))

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        """Deletes a queue."""
        try:
            super()._delete(queue, *args, **kwargs)
        except redis.ResponseError as error:
            if find_refusal(error) != "OOM":
                raise
        with self.conn_or_acquire() as client:
            client.delete(*lists_of(self, queue), *later_sets(queue))

    def _has_queue(self, queue: str, **_: Any) -> bool:
        """Whether any message waits in a queue."""
        return self._size(queue) > 0

    def _purge(self, queue: str) -> int:
        """Removes all messages that wait in a queue, or for their time; returns how many."""
        with self.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for key in lists_of(self, queue):
                pipe.llen(key).delete(key)
            for key in later_sets(queue):
                # Kombu's client does not know that this command takes a key.
                pipe.zcard(f"{self.global_keyprefix}{key}").delete(key)
            return sum(pipe.execute()[::2])

    def _get(self, queue: str) -> Any:
        """Takes a message for `basic_get`, those without a tenant first."""
        for name in (queue, *tenant_lists(queue, self.sep)):
            with contextlib.suppress(Empty):
                return super()._get(name)
        raise Empty


class DeviceQueueChannel(ConnectingChannel, OutboxChannel, FullRedisChannel):
    """What Batchery adds to a channel of kombu's; mixed into its Redis channels."""

    QoS = QoS

    #: Transport option: silence of a device, in seconds, after which others take its jobs.
    lease_expiry_s = 5.0

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        """Consumes a queue."""
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if queue not in self.active_fanout_queues and not self._in_poll:
            # Who looks for workers must not take one for it that only awaits their answers, or
            # whose devices say themselves what they take.
            with contextlib.suppress(redis.RedisError):
                self.client.client_setname(REPLIES_CLIENT if no_ack else WORKER_CLIENT)
        return result

    def _brpop_read(self, **options: Any) -> Any:
        """Hands a message over; one that cannot be read is dropped, and does not end the worker."""
        try:
            # A primary that becomes a replica ends what waits for messages.
            with refusals_as_lost_connection():
                return super()._brpop_read(**options)
        except MALFORMED as error:
            logger.critical("a message is dropped, as it cannot be read: %r", error)
            raise Empty from None


class Channel(DeviceQueueChannel, kombu_redis.Channel):  # type: ignore[misc]
    """A channel to one Redis server."""

    from_transport_options = (*kombu_redis.Channel.from_transport_options, *OPTIONS)


class SentinelChannel(DeviceQueueChannel, kombu_redis.SentinelChannel):  # type: ignore[misc]
    """A channel to the master that Sentinel names."""

    from_transport_options = (*kombu_redis.SentinelChannel.from_transport_options, *OPTIONS)


class ClusterChannel(DeviceQueueChannel, kombu_redis.Channel):  # type: ignore[misc]
    """A channel to one shard of a cluster: kombu's key prefix is the shard's tag."""

    #: Transport options: URL of the cluster, and number of the shard.
    cluster_url = ""
    shard = 0

    from_transport_options = (*Channel.from_transport_options, "cluster_url", "shard")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = args[0].client.transport_options
        options["global_keyprefix"] = list_tags()[options["shard"]]
        super().__init__(*args, **kwargs)

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        params = super()._connparams(asynchronous)
        of_address = {"host", "port", "username", "password", "connection_class"}
        own = {name: value for name, value in params.items() if name not in of_address}
        return {**own, **slot_options(self.cluster_url, self.shard)}


@contextlib.contextmanager
def refusals_as_lost_connection() -> Iterator[None]:
    """Turns what Redis refuses into a lost connection, as a refusal would end Celery's worker.

    Such a refusal passes: READONLY after a failover, or MISCONF while the disk is full.
    """
    try:
        yield
    except redis.exceptions.NoScriptError:
        raise
    except redis.ResponseError as error:
        raise redis.ConnectionError(f"the broker refuses to serve: {error}") from error


@contextlib.contextmanager
def forgone_if_full() -> Iterator[None]:
    """Lets a note of a queue's binding be missing: consumers need none, and publishers make it."""
    try:
        yield
    except redis.ResponseError as error:
        # Redis 6.2 has no error of its own for what it refuses within a script.
        if find_refusal(error) != "OOM":
            raise
        logger.debug("the binding of a queue is not noted: %s", error)
