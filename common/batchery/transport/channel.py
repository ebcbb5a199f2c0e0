"""A kombu channel that leases messages, many at a time, instead of popping them one by one.

Its `QoS` knows which messages count against the prefetch, and how they are settled.
"""

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from queue import Empty
from time import monotonic, time
from types import MappingProxyType
from typing import Any

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps

from batchery.retry import find_refusal
from batchery.transport.consume import (
    Fetcher,
    forgone_if_full,
    leave_fenced,
    refusals_as_lost_connection,
)
from batchery.transport.inbox import Inbox, Message, Workload
from batchery.transport.lease_store import LeaseStore, acquire_lease_store, discard_lease_store
from batchery.transport.leases import HeldJob
from batchery.transport.membership import Heartbeat
from batchery.transport.outbox import OutboxChannel
from batchery.transport.redis_schema import (
    REPLIES_CLIENT,
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

#: Transport options in addition to kombu's.
OPTIONS = (
    "leases",
    "lease_expiry_s",
    "queue_prefetch",
    "fetch_messages",
    "class_levels",
    "ordinary_queues",
)

#: Maximum number of messages of one fetch where the prefetch has no limit.
MAX_UNLIMITED_FETCH = 1000


class QoS(_QoS):  # type: ignore[misc]
    """Counts leased messages, which need no entry of their own in Redis: the lease is it.

    Messages that came another way, such as by `basic_get`, are treated as kombu does.
    """

    @property
    def free(self) -> int:
        """How many more messages the channel may hold."""
        if "can_consume" in vars(self):
            # Celery puts it there for `worker_disable_prefetch`, and wants to be asked each time.
            return 1
        if not self.prefetch_count:
            return MAX_UNLIMITED_FETCH
        return int(max(0, self.prefetch_count - len(self._delivered) + len(self._dirty)))

    def is_leased(self, tag: str) -> bool:
        """Whether a message has a lease, or is one of kombu's."""
        # Stock tags are UUIDs, tokens are numbers.
        return self.channel.lease_store is not None and tag.isdigit()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Counts a message."""
        if self.is_leased(delivery_tag):
            virtual.QoS.append(self, message, delivery_tag)
            return
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

    def adopt(self, token: str) -> None:
        """Counts a job that still runs, whose message came over a channel that is gone."""
        virtual.QoS.append(self, None, token)

    def forget(self, token: str) -> None:
        """Stops counting a message; from any thread."""
        # A malformed message was never delivered, and so never counted.
        if token in self._delivered:
            self._dirty.add(token)
        self.channel.make_room()

    def ack(self, delivery_tag: str) -> None:
        """Settles a message; Redis is told together with others, before the loop waits again."""
        if self.is_leased(delivery_tag):
            self.channel.lease_store.ack(delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drops a message, or gives it back to the end of its queue, as kombu does."""
        if not self.is_leased(delivery_tag):
            super().reject(delivery_tag, requeue)
        elif requeue:
            try:
                self.channel.lease_store.requeue([delivery_tag], first=False)
            except (redis.RedisError, OSError):
                # Whoever rejects it may only log that, and nobody else remembers the message.
                self.channel.prepare_anew()
                raise
        else:
            self.channel.lease_store.ack(delivery_tag)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Gives back what plain workers have held for too long, if there is room for it."""
        try:
            super().restore_visible(*args, **kwargs)
        except redis.ResponseError as error:
            # At maxmemory kombu gets no lock, and the error would end the worker. It tries again.
            logger.debug("nothing is restored of what plain workers hold: %r", error)

    def restore_unacked(self, *args: Any, **kwargs: Any) -> Any:
        """Gives back what the channel counts, unless the connection broke."""
        store = self.channel.lease_store
        if store is not None:
            self._flush()
            for tag in [tag for tag in self._delivered if self.is_leased(tag)]:
                del self._delivered[tag]
            if self.channel.is_broken:
                store.leases.abandon(self)
            elif tokens := store.leases.owned_by(self):
                store.requeue(tokens, first=True)
                logger.info("jobs given back to their queues: %d", len(tokens))
        return super().restore_unacked(*args, **kwargs)

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Gives back what the channel counts, as the channel closes."""
        if self.channel.lease_store is not None:
            # Kombu does it only where it counts messages, and logs how many.
            self.restore_unacked()
        super().restore_unacked_once(stderr)


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
        # Kombu's limit is 10, and up to 64 `completion_threads` may ask at once.
        pool.max_connections = max(pool.max_connections, 100)
        return redis.Redis(connection_pool=pool)

    def _database_identity(self) -> tuple[Any, ...]:
        """What tells the broker's database from all others."""
        params = self._connparams()
        names = [str(params.get(name)) for name in ("host", "port", "path", "db")]
        # Behind one Sentinel there may be several masters.
        return (*names, getattr(self, "master_name", None), self.global_keyprefix)


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
            client.delete(*lists_of(self, queue))

    def _has_queue(self, queue: str, **_: Any) -> bool:
        """Whether any message waits in a queue."""
        return self._size(queue) > 0

    def _purge(self, queue: str) -> int:
        """Removes all messages that wait in a queue; returns how many."""
        with self.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for key in lists_of(self, queue):
                pipe.llen(key).delete(key)
            return sum(pipe.execute()[::2])

    def _get(self, queue: str) -> Any:
        """Takes a message for `basic_get`, those without a tenant first."""
        for name in (queue, *tenant_lists(queue, self.sep)):
            with contextlib.suppress(Empty):
                return super()._get(name)
        raise Empty


class LeasingChannel(ConnectingChannel, OutboxChannel, FullRedisChannel):
    """How a channel leases; mixed into kombu's Redis channels.

    A channel that never consumes with acknowledgements, such as a client's, stays kombu's own.
    """

    QoS = QoS
    Message = Message

    #: Transport option: False makes this kombu's own channel.
    leases = True
    #: Transport option: silence of a worker, in seconds, after which others take its jobs.
    lease_expiry_s = 5.0
    #: Transport option: how many unsettled messages of a queue and priority class this worker may
    #: hold, by queue name; a class of a queue without an entry has its part of the prefetch.
    queue_prefetch: Mapping[str, int] = MappingProxyType({})
    #: Transport option: maximum number of messages of one fetch. Other workers fetch in between.
    fetch_messages = 1000
    #: Transport option: first priority of each class, in order; without any there are no classes.
    class_levels: Sequence[int] = ()
    #: Transport option: queues whose messages are all of one class.
    ordinary_queues: Collection[str] = ()

    #: None until the channel consumes with acknowledgements.
    lease_store: LeaseStore | None = None
    #: Takes in what was leased; exists once there is a lease store.
    inbox: Inbox
    #: Asks for messages; exists once there is a lease store.
    fetcher: Fetcher
    #: The jobs of this worker, where its pool tells of them; see `Workload`.
    workload: Workload | None = None
    #: Node name of this worker, such as `w1@host`; None where nobody has set it.
    node_name: str | None = None
    #: Whether the connection broke, so that leases outlive the channel.
    is_broken = False

    #: What kombu's `_in_poll` stands for: an answer to a fetch, or a push. If both are False, it is
    #: a BRPOP of kombu's, which may be under way when the channel begins to lease.
    _fetching = _waiting = False
    _brpop_sent_at: float | None
    _prepared: Any = None
    #: Whether a lease has ended since the loop last looked; set from any thread.
    _has_room = False
    #: Whether the last fetch brought nothing although a key was there.
    _fruitless = False

    @property
    def served_queues(self) -> list[str]:
        """The queues that are consumed; from any thread."""
        return sorted(self.active_queues)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        """Consumes a queue; with acknowledgements, by leases."""
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if not (self.leases and self.ack_emulation) or queue in self.active_fanout_queues:
            return result
        if self.lease_store is None and not no_ack:
            self._open_lease_store()
        if self.lease_store is None and not self._in_poll:
            # Who looks for workers must not take one for it that only awaits their answers.
            with contextlib.suppress(redis.RedisError):
                self.client.client_setname(REPLIES_CLIENT)

        def deliver(payload: Any) -> None:
            message = self._message(payload)
            if message is None:
                return
            leased = self.qos.is_leased(message.delivery_tag)
            if leased or not no_ack:
                self.qos.append(message, message.delivery_tag)
            if leased and no_ack:
                self.qos.ack(message.delivery_tag)
            callback(message)

        self.connection._callbacks[queue] = deliver
        self.ask_again()
        return result

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Stops consuming a queue; nothing must be kept for this worker any more."""
        store = self.lease_store
        if store is not None and not self.is_broken and self.fetcher.is_entered:
            with contextlib.suppress(*self.connection_errors):
                store.stop_waiting()
                self.fetcher.forget_entry()
        return super().basic_cancel(consumer_tag)

    def _message(self, payload: Any) -> Any:
        """The message; None if it was leased and is malformed, and became a dead letter."""
        tag = payload["properties"]["delivery_tag"]
        try:
            return self.Message(payload, channel=self)
        except Exception as error:
            # A message may be malformed in any way.
            if not self.qos.is_leased(tag):
                raise
            self.inbox.dead_letter(tag, error)
            return None

    def _open_lease_store(self) -> None:
        def make() -> LeaseStore:
            client = self._make_separate_client(self._connparams()["socket_timeout"])
            return LeaseStore(client, self.global_keyprefix, self.lease_expiry_s)

        store = acquire_lease_store(self._database_identity(), self, make)
        try:
            if not store.is_open:
                store.open()
                heartbeat = Heartbeat(store, self._make_separate_client(store.expiry_s / 2))
                heartbeat.start()
                store.heartbeat = heartbeat
        except BaseException:
            discard_lease_store(store)
            raise
        self.inbox = Inbox(self, store)
        self.fetcher = Fetcher(self, store, self.inbox)
        self.lease_store = store

    # Taking

    def _brpop_start(self, timeout: float | None = None) -> None:
        if self.lease_store is None:
            super()._brpop_start(timeout)
        else:
            with refusals_as_lost_connection():
                self._ask()

    def _ask(self) -> None:
        self._raise_if_fenced()
        connection = self.client.connection
        if self._prepared is not connection._sock:
            self._prepare(connection)
        self._has_room = False
        if self.fetcher.ask(connection):
            self._in_poll = connection
            self._brpop_sent_at = monotonic()
            self._fetching, self._waiting = True, False

    def _prepare(self, connection: Any) -> None:
        self._fetching = self._waiting = self._fruitless = False
        self.fetcher.prepare(connection)
        # An answer may have died with the connection before.
        self.inbox.reconcile()
        self._prepared = connection._sock

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken, as with a new connection."""
        self._prepared = None
        self.ask_again()

    def _raise_if_fenced(self) -> None:
        if self.lease_store is not None and self.lease_store.fenced:
            leave_fenced(self.lease_store)

    def _brpop_read(self, **options: Any) -> bool:
        if self.lease_store is None or (self._in_poll and not (self._fetching or self._waiting)):
            # A primary that becomes a replica ends what waits for messages.
            with refusals_as_lost_connection():
                return bool(super()._brpop_read(**options))
        connection = self.client.connection
        fetching = self._fetching
        self._fetching = self._waiting = False
        self._in_poll = None
        try:
            with refusals_as_lost_connection():
                if not fetching and not self._ask_at_once(connection):
                    raise Empty
                answer = self.fetcher.read(connection)
                self._on_answer(answer, connection)
            if not answer:
                raise Empty
        except redis.exceptions.NoScriptError:
            self.prepare_anew()  # Somebody flushed the scripts.
            raise Empty from None
        except self.connection_errors:
            connection.disconnect()
            raise
        finally:
            self._flush_brpop_reauth()
        take_in = partial(self.inbox.take_in, answer, self.fetcher.keys)
        if self.workload is None:
            take_in()
        else:
            self.workload.hand_over(take_in)
        return True

    def _ask_at_once(self, connection: Any) -> bool:
        """Fetches because a push has come; returns whether an answer must be read.

        The answer is waited for, as Redis answers sooner than the loop turns. The push is in front
        of it.
        """
        self._fruitless = False
        self._ask()
        is_asked = self._fetching
        self._fetching, self._in_poll = False, None
        if not is_asked:
            connection.read_response(push_request=True)
        return is_asked

    def _on_answer(self, answer: Any, connection: Any) -> None:
        assert self.lease_store is not None
        if answer is None:
            self.lease_store.fenced = True
        elif self.fetcher.took_all or (self._fruitless and not answer):
            self._wait(connection)
        # Otherwise the channel asks once more. If that brings nothing either, the key is no list,
        # and the next sweep looks again.
        self._fruitless = self.fetcher.watches and not answer and not self.fetcher.took_all

    def _wait(self, connection: Any) -> None:
        self._waiting = True
        self._in_poll = connection
        self._brpop_sent_at = None  # No answer is owed.

    def ask_again(self) -> None:
        """Looks into the queues again in the next turn of the loop."""
        if self._waiting:
            self._waiting = self._fruitless = False
            self._in_poll = None

    def sweep(self) -> None:
        """Looks for what was missed: a wake-up that got lost must not hold up a job for ever.

        Raises:
            Fenced: Other workers took this one's leases; also found where no more can be taken.
        """
        if self.lease_store is None:
            return
        with refusals_as_lost_connection():
            self._raise_if_fenced()
            self.lease_store.flush()
            connection = self._in_poll
            is_alive = connection and connection._sock is self._prepared
            # A fetch that finds nothing tells Redis what this worker could begin.
            if (self._waiting and is_alive) and (
                self._is_capacity_stale or not self.fetcher.nothing_came(connection)
            ):
                self.ask_again()

    def make_room(self) -> None:
        """Wakes the loop because a lease has ended, so that it fetches again; from any thread."""
        if not self._has_room:
            self._has_room = True
            if (transport := self.connection) is not None:
                transport.wake()

    def look_for_room(self) -> None:
        """Fetches again where a queue had its share and no longer has."""
        if self._fetching:
            # The answer comes, and the loop turns once more.
            return
        has_room, self._has_room = self._has_room, False
        if has_room and self._waiting and self.fetcher.left_some_out:
            self.ask_again()

    def read_push(self) -> None:
        """Reads a wake-up that nobody waits for, as there is no room for more messages."""
        with contextlib.suppress(*self.connection_errors):
            # redis-py drops a broken connection; it is made anew when messages are wanted.
            self.client.connection.read_response(push_request=True)

    # Giving

    @property
    def _is_capacity_stale(self) -> bool:
        """Whether Redis knows another capacity than this worker has."""
        return self.workload is not None and self.workload.capacity() != self.fetcher.known_capacity

    def others_wait(self) -> bool:
        """Whether other workers wait for work.

        Raises:
            redis.ConnectionError: Redis does not answer.
        """
        store = self.lease_store
        with refusals_as_lost_connection():
            return store is not None and not store.fenced and store.others_wait()

    def give_to_waiting(self, jobs: Sequence[HeldJob]) -> set[str]:
        """Gives jobs to other workers, as many as they could begin at once.

        Args:
            jobs: Oldest first; this worker has not begun them.

        Returns:
            Tokens of the leases that have ended; their messages are in their queues again.

        Raises:
            redis.ConnectionError: Nobody knows what went back; the next connection finds out.
        """
        store = self.lease_store
        if store is None or store.fenced:
            return set()
        first_step = self.priority_steps[0]
        with refusals_as_lost_connection():
            return store.give_to_waiting(
                (
                    job,
                    store.keys.queue(
                        self._q_for_pri(self.inbox.find_place(lease.key)[0], first_step)
                    ),
                )
                for job in jobs
                if (lease := store.leases.get(job.token))
            )

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_poll is connection:
            self._fetching = self._waiting = False
        super()._on_connection_disconnect(connection)

    # Ending

    def close(self) -> None:
        """Closes the channel; what it holds goes back, unless the connection broke."""
        store = self.lease_store
        if store is None or self.closed:
            super().close()
            return
        self._end_poll()
        try:
            super().close()
        finally:
            store.holder = None
            if not self.is_broken:
                discard_lease_store(store)
                if store.heartbeat is not None:
                    store.heartbeat.stop()
                store.close()

    def _end_poll(self) -> None:
        """Leaves nothing under way; what a fetch brings just now is in the leases already."""
        if self._fetching:
            # Kombu uses this connection once more, and must not take that answer for its own.
            self.client.connection.disconnect()
        self.ask_again()


class Channel(LeasingChannel, kombu_redis.Channel):  # type: ignore[misc]
    """A channel to one Redis server."""

    from_transport_options = (*kombu_redis.Channel.from_transport_options, *OPTIONS)


class SentinelChannel(LeasingChannel, kombu_redis.SentinelChannel):  # type: ignore[misc]
    """A channel to the master that Sentinel names."""

    from_transport_options = (*kombu_redis.SentinelChannel.from_transport_options, *OPTIONS)

    def _database_identity(self) -> tuple[Any, ...]:
        client: Any = self.connection.client
        host, port, *rest = super()._database_identity()
        # After a failover kombu may be at another Sentinel of the URL; all name the same master.
        return (*(client.alt or (host, port)), *rest)
