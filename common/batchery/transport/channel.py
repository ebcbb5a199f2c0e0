"""A kombu channel that leases messages, many at a time, instead of popping them one by one.

While there is nothing to take, it waits without popping: Redis tracks the queues' keys for its
connection and says when one of them changes.
"""

import contextlib
from collections.abc import Mapping
from queue import Empty
from time import monotonic
from types import MappingProxyType
from typing import Any

import redis
from kombu.transport import redis as kombu_redis

from batchery.transport.clients import ConnectingChannel
from batchery.transport.drain import Drain, leave_fenced, refusals
from batchery.transport.heart import Heart
from batchery.transport.inbox import Inbox
from batchery.transport.ledger import Ledger
from batchery.transport.ledgers import lend, retire
from batchery.transport.message import Message
from batchery.transport.qos import QoS
from batchery.transport.sending import SendingChannel

#: Transport options beside kombu's.
OPTIONS = ("leases", "lease_expiry_s", "queue_prefetch", "drain_messages")


class LeasingChannel(ConnectingChannel, SendingChannel):
    """Mixed into kombu's Redis channels.

    A channel that never consumes with acknowledgements, as that of a client does, is kombu's own.
    """

    QoS = QoS
    Message = Message

    #: Transport option: False makes this kombu's own channel.
    leases = True
    #: Transport option: after which silence of a worker others take its jobs, in seconds.
    lease_expiry_s = 5.0
    #: Transport option: how many unsettled messages a queue may have here, by queue name; without
    #: an entry as many as the prefetch allows.
    queue_prefetch: Mapping[str, int] = MappingProxyType({})

    #: Transport option: most messages of one drain. Other workers take theirs in between.
    drain_messages = 1000

    ledger: Ledger | None = None
    #: Takes in what was leased; there with the ledger.
    inbox: Inbox
    #: Asks for messages; there with the ledger.
    drain: Drain
    #: Whether the connection broke, so that leases outlive the channel.
    is_broken = False

    #: What kombu's `_in_poll` stands for: an answer to a drain, or a push; with neither, a BRPOP of
    #: kombu's own, which may be under way when the channel begins to lease.
    _draining = _waiting = False
    _brpop_sent_at: float | None
    _prepared: Any = None
    #: Set from any thread when a lease ends.
    has_room = False
    #: Whether the last drain brought nothing although a key was there.
    _fruitless = False

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        """Consumes a queue; with acknowledgements, by leases."""
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if not self.leases or queue in self.active_fanout_queues:
            return result
        if self.ledger is None and not no_ack:
            self._open_ledger()

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
        self.rouse()
        return result

    def _message(self, payload: Any) -> Any:
        """The message, or None where it was leased and is malformed: then it is buried."""
        tag = payload["properties"]["delivery_tag"]
        try:
            return self.Message(payload, channel=self)
        except Exception as error:
            # A message may be malformed in any way.
            if not self.qos.is_leased(tag):
                raise
            self.inbox.bury(tag, error)
            return None

    def _open_ledger(self) -> None:
        def make() -> Ledger:
            client = self._client_of_its_own(self._connparams()["socket_timeout"])
            return Ledger(client, self.global_keyprefix, self.lease_expiry_s)

        ledger = lend(self._place(), self, make)
        try:
            if not ledger.is_open:
                ledger.open()
                ledger.heart = Heart(ledger, self._client_of_its_own(ledger.expiry_s / 2))
                ledger.heart.start()
        except BaseException:
            retire(ledger)
            raise
        self.inbox = Inbox(self, ledger)
        self.drain = Drain(self, ledger, self.inbox)
        self.ledger = ledger

    # Taking

    def _brpop_start(self, timeout: float | None = None) -> None:
        if self.ledger is None:
            super()._brpop_start(timeout)
            return
        with refusals():
            self._raise_if_fenced()
            connection = self.client.connection
            if self._prepared is not connection._sock:
                self._prepare(connection)
            self.has_room = False
            if self.drain.ask(connection):
                self._in_poll = connection
                self._brpop_sent_at = monotonic()
                self._draining, self._waiting = True, False

    def _prepare(self, connection: Any) -> None:
        self._draining = self._waiting = self._fruitless = False
        self.drain.prepare(connection)
        # An answer may have died with the connection before.
        self.inbox.reconcile()
        self._prepared = connection._sock

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more is taken, as with a new connection."""
        self._prepared = None
        self.rouse()

    def _raise_if_fenced(self) -> None:
        if self.ledger is not None and self.ledger.fenced:
            leave_fenced(self.ledger)

    def _brpop_read(self, **options: Any) -> bool:
        if self.ledger is None or (self._in_poll and not (self._draining or self._waiting)):
            return bool(super()._brpop_read(**options))
        connection = self.client.connection
        draining = self._draining
        self._draining = self._waiting = False
        self._in_poll = None
        try:
            with refusals():
                if not draining and not self._ask_at_once(connection):
                    raise Empty
                answer = self.drain.read(connection)
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
        self.inbox.take_in(answer, self.drain.keys)
        return True

    def _ask_at_once(self, connection: Any) -> bool:
        """Drains as a push has come; returns whether an answer is to be read.

        It is waited for, as Redis answers sooner than the loop turns. The push is in front of it.
        """
        self._fruitless = False
        self._brpop_start()
        is_asked = self._draining
        self._draining, self._in_poll = False, None
        if not is_asked:
            connection.read_response(push_request=True)
        return is_asked

    def _on_answer(self, answer: Any, connection: Any) -> None:
        assert self.ledger is not None
        if answer is None:
            self.ledger.fenced = True
        elif self.drain.took_all or (self._fruitless and not answer):
            self._wait(connection)
        # Else once more; if that brings nothing either, the key is no list: the next sweep.
        self._fruitless = self.drain.watches and not answer and not self.drain.took_all

    def _wait(self, connection: Any) -> None:
        self._waiting = True
        self._in_poll = connection
        self._brpop_sent_at = None  # No answer is owed.

    def rouse(self) -> None:
        """Looks into the queues again in the next turn of the loop."""
        if self._waiting:
            self._waiting = self._fruitless = False
            self._in_poll = None

    def sweep(self) -> None:
        """Now and then: a wake-up that got lost must not hold up a job for ever.

        Raises:
            Fenced: Others took this worker's leases; also found where no more can be taken.
            redis.RedisError: Redis does not answer.
        """
        if self.ledger is None:
            return
        with refusals():
            self._raise_if_fenced()
            self.ledger.flush()
            connection = self._in_poll
            is_alive = connection and connection._sock is self._prepared
            if self._waiting and is_alive and not self.drain.nothing_came(connection):
                self.rouse()

    def look_for_room(self) -> None:
        """Drains again where a queue had its share and no longer has."""
        if self._waiting and self.drain.left_some_out and self.has_room:
            self.rouse()

    def read_push(self) -> None:
        """Reads a wake-up for which nobody waits, as there is no room for more messages."""
        with contextlib.suppress(*self.connection_errors):
            # Redis-py drops a broken one; it is made anew when messages are wanted.
            self.client.connection.read_response(push_request=True)

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_poll is connection:
            self._draining = self._waiting = False
        super()._on_connection_disconnect(connection)

    # Ending

    def close(self) -> None:
        """Closes the channel; what it holds goes back, unless the connection broke."""
        ledger = self.ledger
        if ledger is None or self.closed:
            super().close()
            return
        self._end_poll()
        try:
            super().close()
        finally:
            ledger.holder = None
        if not self.is_broken:
            retire(ledger)
            ledger.heart.stop()
            ledger.close()

    def _end_poll(self) -> None:
        """Leaves nothing under way; what a drain brings just now is in the leases already."""
        if self._draining:
            # Kombu uses this connection once more, and must not read that answer for its own.
            self.client.connection.disconnect()
        self.rouse()


class Channel(LeasingChannel, kombu_redis.Channel):  # type: ignore[misc]
    """A channel to one Redis server."""

    from_transport_options = (*kombu_redis.Channel.from_transport_options, *OPTIONS)


class SentinelChannel(LeasingChannel, kombu_redis.SentinelChannel):  # type: ignore[misc]
    """A channel to the master that Sentinel names."""

    from_transport_options = (*kombu_redis.SentinelChannel.from_transport_options, *OPTIONS)
