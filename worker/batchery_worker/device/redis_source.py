"""Where a device's jobs come from: it leases them from Redis itself.

The fetch script takes messages out of the queues into the leases of this device. While there is
nothing, Redis tracks the lists for the device's connection, and says when one of them changes.
"""

import contextlib
import logging
import os
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery
from kombu.utils.scheduling import cycle_by_name

from batchery.retry import pause_s
from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.consume import Fetcher
from batchery.transport.inbox import Inbox, Workload
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import BATCHES

logger = logging.getLogger("batchery.device")

#: How often an idle device looks into its queues although nothing woke it, in seconds.
SWEEP_INTERVAL_S = 1.0

#: Longest pause between two attempts to reach a broker that is away, in seconds.
MAX_RECONNECT_S = 2.0


class Owner:
    """Counts leases against no prefetch: the scheduler knows what is held."""

    #: Maximum number of messages of one fetch, besides the limits of queues.
    free = 1 << 30

    def adopt(self, token: str) -> None:
        """Does nothing."""

    def forget(self, token: str) -> None:
        """Does nothing."""


class RedisSource:
    """Leases messages for one device; whoever drives it calls it, from one thread at a time.

    Its public attributes are what `Fetcher` and `Inbox` need of a channel.
    """

    def __init__(
        self,
        app: Celery,
        queues: Sequence[str],
        options: Mapping[str, Any],
        deliver: Callable[[Any], None],
        find_held: Callable[[], Collection[str]],
    ) -> None:
        """Does not connect yet.

        Args:
            app: Its broker is asked.
            queues: Names of the queues.
            options: `fetch_messages`, `class_levels`, `queue_prefetch`, as those of the transport.
            deliver: Takes in a message, as kombu reads it from a queue.
            find_held: Tokens of the leases whose jobs are here.
        """
        self._app = app
        self._deliver = deliver
        self._find_held = find_held
        self._names = list(queues)
        self.fetch_messages = int(options.get("fetch_messages", 1000))
        self.class_levels: Sequence[int] = options.get("class_levels", ())
        self.queue_prefetch: Mapping[str, int] = options.get("queue_prefetch", {})
        self.ordinary_queues: Collection[str] = ()
        self.workload: Workload | None = None
        self.qos = Owner()
        self.connection = SimpleNamespace(_callbacks={})
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._sleeps = False
        self._is_stale = True
        self._fruitless = False
        #: Whether the last answer does not say that the lists are empty, and watched.
        self.may_have_more = False
        self._redis: Any = None
        #: Failed attempts in a row to reach the broker, and until when no other one is made.
        self._failures, self._away_until_s = 0, 0.0
        #: Called with the id of this holder whenever it is a new one.
        self.on_joined: Callable[[str], None] = lambda _: None
        self._open()

    # What Fetcher and Inbox ask

    @property
    def active_queues(self) -> Collection[str]:
        """Names of the queues."""
        return self._names

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken."""
        self._is_stale = True

    def _q_for_pri(self, queue: str, pri: int) -> str:
        return f"{queue}{self.sep}{pri}" if pri else queue

    # Connecting

    def _open(self) -> None:
        """Reads how to connect, and registers this device as a holder.

        Raises:
            redis.RedisError: No broker answers.
        """
        with self._app.connection_for_read() as connection:
            once_each = len(connection.alt or ())
            connection.ensure_connection(
                max_retries=once_each, interval_start=0, reraise_as_library_errors=False
            )
            channel: Any = connection.channel()
            try:
                self.sep, self.global_keyprefix = channel.sep, channel.global_keyprefix
                self.priority_steps = channel.priority_steps
                self._queue_cycle = cycle_by_name(channel.queue_order_strategy)()
                self._queue_cycle.update(self._names)
                self._pool = channel._get_pool(asynchronous=True)
                client = channel._make_separate_client(SOCKET_TIMEOUT_S)
                self.lease_store = LeaseStore(
                    client, channel.global_keyprefix, channel.lease_expiry_s
                )
            finally:
                channel.close()
        self.lease_store.open()
        self.inbox = Inbox(self, self.lease_store)
        self.fetcher = Fetcher(self, self.lease_store, self.inbox)
        self._listen()

    def _listen(self) -> None:
        for name in self._names:
            # Jobs of tenants that came by a queue of ordinary tasks are in lists of that one.
            self.connection._callbacks[name] = self._deliver
            self.connection._callbacks[name.removesuffix(BATCHES)] = self._deliver

    def select_queues(self, queues: Sequence[str]) -> None:
        """Takes from other queues from now on."""
        self._names = list(queues)
        self._queue_cycle.update(self._names)
        self._listen()
        self._is_stale = True

    def _connect(self) -> Any:
        if self._redis is None:
            self._redis = self._pool.get_connection()
            self._is_stale = True
        return self._redis

    def _disconnect(self) -> None:
        connection, self._redis = self._redis, None
        self._fruitless = False
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    # Taking

    def ask(self) -> bool:
        """Sends the question which messages there are; False if none is wanted, or possible."""
        if monotonic() < self._away_until_s:
            return False
        try:
            if self.lease_store.fenced:
                self._rejoin()
            connection = self._connect()
            if self._is_stale:
                self.fetcher.prepare(connection)
                self._reconcile()
                self._is_stale = False
            return self.fetcher.ask(connection)
        except redis.exceptions.NoScriptError:
            self._is_stale = True
        except (redis.RedisError, OSError) as error:
            self._lose(error)
        return False

    def read(self) -> Any:
        """Reads the answer; empty if there is nothing. For whoever drives, without a lock."""
        try:
            answer = self.fetcher.read(self._redis)
        except redis.exceptions.NoScriptError:
            self._is_stale = True  # Somebody flushed the scripts.
            return []
        except (redis.RedisError, OSError) as error:
            self._lose(error)
            return []
        self._failures = 0
        if answer is None:
            self.lease_store.fenced = True
            return []
        # A push may have come behind the answer. If asking again brings nothing either, a key is no
        # list, and the next sweep looks again.
        was_fruitless, took_all = self._fruitless, self.fetcher.took_all
        self._fruitless = self.fetcher.watches and not answer and not took_all
        self.may_have_more = not took_all and not (was_fruitless and not answer)
        return answer

    def take_in(self, answer: Any) -> None:
        """Hands over what was brought."""
        try:
            self.inbox.take_in(answer, self.fetcher.keys)
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def hand_over(self, taken: tuple[str, str, bytes]) -> None:
        """Hands one message over."""
        try:
            self.inbox._hand_over([taken], with_suspects=False)
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def _reconcile(self) -> None:
        """Compares the leases with those in Redis: an answer may have died with a connection."""
        self.qos = Owner()
        taken = self.lease_store.reconcile(self.qos, self._find_held())
        if taken:
            self.inbox._hand_over(taken, with_suspects=True, again=True)

    def _rejoin(self) -> None:
        lost = self.lease_store.rejoin()
        self._is_stale = True
        self.on_joined(self.lease_store.worker)
        logger.warning(
            "this device was silent for too long: its leases were handed on, %d jobs", lost
        )

    def _lose(self, error: Exception) -> None:
        logger.debug("the broker does not answer: %r", error)
        self._disconnect()
        self._failures += 1
        self._away_until_s = monotonic() + pause_s(self._failures, MAX_RECONNECT_S)

    # Waiting

    def wait(self, timeout_s: float | None, is_due: Callable[[], bool]) -> None:
        """Waits until Redis tells of a change, somebody wakes it, or the time is over.

        Args:
            timeout_s: The time, in seconds; None for a second.
            is_due: Whether there is something to do that nobody is woken for any more.
        """
        timeout_s = SWEEP_INTERVAL_S if timeout_s is None else min(timeout_s, SWEEP_INTERVAL_S)
        if self._away_until_s:
            timeout_s = min(timeout_s, max(0.0, self._away_until_s - monotonic()))
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        connection = self._redis
        if connection is not None and connection._sock is not None:
            poll.register(connection._sock, select.POLLIN)
        self._sleeps = True
        found = dict(poll.poll(0 if is_due() else max(0.0, timeout_s) * 1e3))
        self._sleeps = False
        with contextlib.suppress(BlockingIOError):
            if self._woken in found:
                os.read(self._woken, 4096)
        if connection is not None and len(found) > (self._woken in found):
            self._read_pushes(connection)

    def _read_pushes(self, connection: Any) -> None:
        try:
            while connection.can_read(timeout=0):
                connection.read_response(push_request=True)
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def wake(self) -> None:
        """Ends a wait; from any thread."""
        if self._sleeps:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"w")
