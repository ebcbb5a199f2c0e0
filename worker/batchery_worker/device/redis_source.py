"""Where a device's jobs come from: it leases them from Redis itself.

The fetch script takes messages out of the queues into the leases of this device. While there is
nothing, Redis tracks the lists for the device's connection, and says when one of them changes.
"""

import contextlib
import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, NamedTuple

import redis
from celery import Celery
from kombu.utils.scheduling import cycle_by_name

from batchery.errors import BatcheryError, RedisUnavailable
from batchery.protocol.figures import LeaseFigures, report
from batchery.retry import pause_s
from batchery.shards import Shard
from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import find_own, split_list
from batchery_worker.brokers import list_places, open_channel
from batchery_worker.consumer import OutageLog
from batchery_worker.device.fetcher import Fetcher, Part, Workload
from batchery_worker.device.inbox import Inbox, Taken
from batchery_worker.device.stock_consumer import LeaseChannel

logger = logging.getLogger("batchery.device")

#: How often an idle device looks into its queues although nothing woke it, in seconds.
SWEEP_INTERVAL_S = 1.0

#: Longest pause between two attempts to reach a broker that is away, in seconds.
MAX_RECONNECT_S = 2.0

#: How often a broker that was left is looked at, in seconds.
PART_S = 1.0


class Place(NamedTuple):
    """One broker, or shard: the leases that this device has there, and how it asks for more."""

    number: int
    store: LeaseStore
    #: Of the connections over which it asks.
    pool: Any
    inbox: Inbox
    fetcher: Fetcher


@dataclass
class Listeners:
    """Who is told of a source's connections."""

    #: Called with the id of this holder, and the number of its place, whenever it is new. What
    #: waits here with another id from there has no lease any more.
    on_joined: Callable[[str, int], None] = lambda *_: None
    #: Called with leases that were left: those of jobs that have not begun must be forgotten.
    on_left: Callable[[LeaseStore], None] = lambda _: None
    #: Called where the broker cannot be used, whoever asks.
    on_refused: Callable[[RedisUnavailable], None] = lambda _: None
    #: Called with the id of a holder that has no leases any more; from any thread.
    on_parted: Callable[[str], None] = lambda _: None


class Alarm:
    """Wakes a thread that waits for connections; of one thread that waits, and any that wake."""

    def __init__(self) -> None:
        """Opens a pipe."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._sleeps = False

    def wait(
        self, connections: Sequence[Any], timeout_s: float, is_due: Callable[[], bool]
    ) -> list[Any]:
        """Waits until a connection has something, somebody wakes it, or the time is over.

        Args:
            connections: Of redis-py.
            timeout_s: The time, in seconds.
            is_due: Whether there is something to do that nobody is woken for any more.

        Returns:
            The connections that have something.
        """
        poll, by_number = select.poll(), {}
        poll.register(self._woken, select.POLLIN)
        for connection in connections:
            if connection._sock is not None:
                poll.register(connection._sock, select.POLLIN)
                by_number[connection._sock.fileno()] = connection
        self._sleeps = True
        found = dict(poll.poll(0 if is_due() else max(0.0, timeout_s) * 1e3))
        self._sleeps = False
        with contextlib.suppress(BlockingIOError):
            if self._woken in found:
                os.read(self._woken, 4096)
        return [connection for number, connection in by_number.items() if number in found]

    def wake(self) -> None:
        """Ends a wait; from any thread."""
        if self._sleeps:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"w")


class RedisSource:
    """Leases messages for one device; whoever drives it calls it, from one thread at a time.

    It waits for a broker that is away, as Celery's consumer does, and keeps its leases meanwhile.
    If there are several brokers, it goes to the next one: what only waits goes back to its queue
    as soon as the first one answers, and what runs is finished with its lease there.
    """

    def __init__(
        self,
        app: Celery,
        queues: Sequence[str],
        levels: Sequence[int],
        hostname: str,
        deliver: Callable[[Any], None],
        find_running: Callable[[LeaseStore], Collection[str]],
        places: Mapping[int, Shard] | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        """Does not connect yet.

        Args:
            app: Its broker is asked.
            queues: Names of the queues.
            levels: First priority of each class.
            hostname: Node name of the worker.
            deliver: Takes in a message, as kombu reads it from a queue.
            find_running: Tokens of the leases whose jobs have begun here; from any thread.
            places: By number, where the queues are: one at a time. By default the app's brokers.
            alarm: One that several sources of a device share.
        """
        self._app = app
        self._deliver = deliver
        self._find_running = find_running
        self._hostname = hostname
        #: Names of the queues.
        self.names = list(queues)
        self._levels = levels
        self._cycle: Any = None
        #: A channel of kombu's, closed: it knows how lists are named.
        self._channel: Any = None
        self.workload: Workload | None = None
        self._alarm = alarm or Alarm()
        #: Several sources of a device may share them.
        self.listeners = Listeners()
        self._is_stale = True
        #: Whether a question was sent whose answer was not read.
        self._is_asked = False
        self._fruitless = False
        #: Whether the last answer does not say that the lists are empty, and watched.
        self.may_have_more = False
        self._redis: Any = None
        places = places or dict(enumerate(list_places(app)))
        self._numbers, self._places = [*places.keys()], [*places.values()]
        self._place: Place | None = None
        self._next_broker = 0
        #: Places that were left while jobs of them ran.
        self._left: list[Place] = []
        #: Failed attempts in a row to reach the broker, and until when no other one is made.
        self._failures, self._away_until_s = 0, 0.0
        self._outages = list(map(self._make_outage_log, self._places))
        #: The holder of which the worker has said that others have its leases.
        self._known_fenced = ""
        #: What others know of this device.
        self._described = ""

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken."""
        self._is_stale = True

    # Connecting

    def _make_outage_log(self, place: Shard) -> OutageLog:
        return OutageLog(place.describe(self._app))

    @property
    def lease_store(self) -> LeaseStore | None:
        """The leases with the broker that is asked; None until one has answered."""
        return None if self._place is None else self._place.store

    @property
    def stores(self) -> Sequence[LeaseStore]:
        """The leases with all brokers that are asked, as far as they have answered."""
        return () if self._place is None else (self._place.store,)

    @property
    def is_connected(self) -> bool:
        """Whether the broker has answered the last time, and leases are held."""
        store = self.lease_store
        return self._redis is not None and store is not None and not store.fenced

    def connect(self) -> bool:
        """Makes sure that a broker takes this device for a holder; may take seconds.

        Returns:
            Whether it does.
        """
        if self._is_asked:
            return True
        if monotonic() < self._away_until_s:
            return False
        try:
            place = self._place
            if place is None:
                place = self._open(self._next_broker)
            elif place.store.fenced:
                if self._known_fenced != place.store.worker:
                    # Its worker beats for nobody before it knows.
                    return False
                self._rejoin(place)
            if self._redis is None:
                self._redis = place.pool.get_connection()
                self._is_stale = True
            if self._is_stale:
                place.fetcher.prepare(self._redis)
        except RedisUnavailable as error:
            self.listeners.on_refused(error)
            self._lose(error)
            return False
        except (redis.RedisError, OSError, BatcheryError) as error:
            self._lose(error)
            return False
        return True

    def _open(self, number: int) -> Place:
        """Registers this device as a holder with a broker."""
        with open_channel(self._app, self._places[number]) as channel:
            self._channel = channel
            self._cycle = cycle_by_name(channel.queue_order_strategy)()
            pool = channel._get_pool(asynchronous=True)
            store = LeaseStore(
                channel._make_separate_client(SOCKET_TIMEOUT_S),
                channel.global_keyprefix,
                channel.lease_expiry_s,
                self._places[number].number,
            )
        store.open()
        inbox = Inbox(self._app, store, self._deliver, self.prepare_anew)
        fetcher = Fetcher(channel, store, self._levels)
        self._place = Place(number, store, pool, inbox, fetcher)
        self.select_queues(self.names)
        self._tell_joined(self._place)
        return self._place

    def _tell_joined(self, place: Place) -> None:
        self._described = ""
        self.listeners.on_joined(place.store.worker, self._numbers[place.number])

    def select_queues(self, queues: Sequence[str]) -> None:
        """Takes from other queues from now on."""
        self.names = list(queues)
        if self._cycle is not None:
            self._cycle.update(self.names)
        self._is_stale = True

    def _disconnect(self) -> None:
        connection, self._redis = self._redis, None
        self._fruitless = self._is_asked = False
        if connection is not None:
            connection.disconnect()
            assert self._place is not None
            self._place.pool.release(connection)

    def _lose(self, error: Exception) -> None:
        """Notes that the broker does not answer, or refuses; several are asked in turns."""
        number = self._next_broker if self._place is None else self._place.number
        self._disconnect()
        self._failures += 1
        # One that only cuts a connection is there.
        if self._failures > 1 or not isinstance(error, redis.ConnectionError):
            self._outages[number](error, 0.0)
        if len(self._places) > 1 and (self._failures > 1 or self._place is None):
            self._leave(number)
        self._away_until_s = monotonic() + pause_s(self._failures, MAX_RECONNECT_S)

    def _rejoin(self, place: Place) -> None:
        fenced = place.store.worker
        lost = place.store.rejoin()
        self._is_stale = True
        self.listeners.on_parted(fenced)
        self._tell_joined(place)
        logger.warning(
            "this device was silent for too long: its leases were handed on, %d jobs", lost
        )

    def fence(self, holder: str) -> None:
        """Notes that others have the leases of a holder; from any thread."""
        for place in (self._place, *self._left):
            if place is not None and place.store.worker == holder:
                self._known_fenced, place.store.fenced = holder, True
        self.wake()

    # Leaving for another broker

    def _leave(self, number: int) -> None:
        self._next_broker = (number + 1) % len(self._places)
        if (place := self._place) is not None:
            self._place = None
            self.listeners.on_left(place.store)
            self._left.append(place)
            threading.Thread(target=self._part, args=(place,), daemon=True).start()

    def _part(self, place: Place) -> None:
        """Gives back what waits with a broker that was left, and stays until the rest has ended."""
        store = place.store
        while not store.fenced:
            try:
                if self._has_parted(store):
                    break
            except (redis.RedisError, OSError) as error:
                logger.debug("nothing can be given back yet: %r", error)
            sleep(PART_S)
        self._left.remove(place)
        self.listeners.on_parted(store.worker)

    def _has_parted(self, store: LeaseStore) -> bool:
        store.flush()
        running = set(self._find_running(store))
        known = {token.decode() for token in store.client.hkeys(store.lease_key)}
        if waiting := known - running - set(store.leases):
            store.requeue(waiting, first=True)
            logger.info("jobs given back to their queues: %d", len(waiting))
        if len(store.leases):
            return False
        store.close()
        return True

    # Taking

    def open_channel(
        self, accept: Collection[str] | None, store: LeaseStore | None = None
    ) -> LeaseChannel:
        """What messages with leases in a store need of a channel; by default, those of now."""
        store = store or self.lease_store
        assert store is not None
        return LeaseChannel(store, self.prepare_anew, accept)

    def ask_ahead(self) -> None:
        """Asks before a batch runs, if the last question was not answered with all that there is.

        Redis finds the messages meanwhile.
        """
        place = self._place
        if place is not None and place.fetcher.brought_much and not self._is_stale:
            self.ask()

    def ask(self) -> bool:
        """Sends the question which messages there are; False if none is wanted, or possible."""
        if self._is_asked:
            return True
        place = self._place
        if self._redis is None or place is None or place.store.fenced or self.workload is None:
            return False
        try:
            was_stale, self._is_stale = self._is_stale, False
            if was_stale:
                self._reconcile(place)
            queues = tuple(self._cycle.consume(len(self.names)))
            if place.fetcher.ask(self._redis, queues, self.workload):
                self._is_asked = True
                return True
            if was_stale or place.fetcher.is_entered:
                # Others would go on giving back what they hold.
                place.store.stop_waiting()
                place.fetcher.is_entered = False
        except (redis.RedisError, OSError) as error:
            self._lose(error)
        return False

    def read(self) -> Any:
        """Reads the answer; empty if there is nothing. For whoever drives, without a lock."""
        place = self._place
        assert place is not None
        fetcher = place.fetcher
        self._is_asked = False
        try:
            answer = fetcher.read(self._redis)
        except redis.exceptions.NoScriptError:
            self._is_stale = True  # Somebody flushed the scripts.
            return []
        except (redis.RedisError, OSError) as error:
            self._lose(error)
            return []
        if self._failures > 1:
            logger.info("connected to the broker again")
        self._failures = 0
        if answer is None:
            place.store.fenced = True
            return []
        if answer:
            self._cycle.rotate(self.find_queue(self.keys[answer[2]]))
        # A push may have come behind the answer. If asking again brings nothing either, a key is no
        # list, and the next sweep looks again.
        was_fruitless, took_all = self._fruitless, fetcher.took_all
        self._fruitless = fetcher.watches and not answer and not took_all
        self.may_have_more = not took_all and not (was_fruitless and not answer)
        return answer

    @property
    def rich_parts(self) -> Collection[Part]:
        """Queues and classes of which there is probably more in Redis."""
        return () if self._place is None else self._place.fetcher.rich_parts

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the last question was about, in order."""
        return () if self._place is None else self._place.fetcher.keys

    def take_in(self, answer: Any) -> None:
        """Hands over what was brought."""
        assert self._place is not None
        try:
            self._place.inbox.take_in(answer, self.keys)
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def hand_over(self, taken: Taken) -> None:
        """Hands one message over."""
        assert self._place is not None
        try:
            self._place.inbox.hand_over([taken])
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def dead_letter(self, token: str, error: Exception) -> None:
        """Makes a dead letter of a message that cannot be understood; while it is handed over."""
        assert self._place is not None
        self._place.inbox.dead_letter(token, error)

    def has_key(self, key: str) -> bool:
        """Whether a key begins as those of this broker or shard do."""
        return self._channel is not None and key.startswith(self._channel.global_keyprefix)

    def find_queue(self, key: str) -> str:
        """The queue of a key, which may be that of any of its lists."""
        return self._find_place(key)[0]

    def find_like(self, key: str, name: str) -> str:
        """The list of a name that has the priority step of a key."""
        found: str = self._channel._q_for_pri(name, self._find_place(key)[1])
        return found

    def _find_place(self, key: str) -> tuple[str, int]:
        channel = self._channel
        return split_list(key.removeprefix(channel.global_keyprefix), channel.sep)

    def _reconcile(self, place: Place) -> None:
        """Compares the leases with those in Redis: an answer may have died with a connection."""
        taken = place.store.reconcile()
        if taken:
            place.inbox.hand_over(taken, with_suspects=True, again=True)

    # Settling

    def flush(self) -> None:
        """Sends what was acknowledged, if the broker is there."""
        store = self.lease_store
        if store is None or not self.is_connected:
            return
        try:
            store.flush()
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def return_due(self) -> None:
        """Gives the jobs back to the queues of this device whose time will soon have come."""
        store = self.lease_store
        if store is None or not self.is_connected:
            return
        try:
            store.return_due(self.names)
        except (redis.RedisError, OSError) as error:
            logger.debug("jobs wait for longer than they should: %r", error)

    def describe(self) -> None:
        """Tells others, through Redis, how much this device holds of each queue."""
        store, leased = self.lease_store, Counter[str]()
        if store is None or not self.is_connected:
            return
        for key, count in store.leases.count_by_key().items():
            leased[find_own(self.find_queue(key))] += count
        queues = sorted({find_own(each) for each in self.names})
        text = store.describe(queues, self._hostname, leased)
        if text != self._described:
            keys = [store.keys.workers, store.keys.worker_info]
            try:
                store.scripts.run("renew", keys, store.worker, text)
            except (redis.RedisError, OSError) as error:
                logger.debug("others cannot be told of this device: %r", error)
            else:
                self._described = text

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows of the leases."""
        store = self.lease_store
        return report(LeaseFigures()) if store is None else store.figures()

    def close(self) -> None:
        """Gives back what is left, and leaves Redis."""
        for place in (self._place, *self._left):
            if place is None:
                continue
            if held := len(place.store.leases):
                logger.info("jobs given back to their queues: %d", held)
            try:
                place.store.close()
            except (redis.RedisError, OSError) as error:
                logger.warning("leases could not be given back, they will expire: %s", error)

    # Waiting

    def wait(self, timeout_s: float | None, is_due: Callable[[], bool]) -> None:
        """Waits until Redis tells of a change, somebody wakes it, or the time is over.

        Args:
            timeout_s: The time, in seconds; None for a second.
            is_due: Whether there is something to do that nobody is woken for any more.
        """
        found = self._alarm.wait(self.watched, self.limit_wait_s(timeout_s), is_due)
        self.read_pushes(found)

    @property
    def watched(self) -> Sequence[Any]:
        """The connections over which Redis tells of changes."""
        return () if self._redis is None else (self._redis,)

    def limit_wait_s(self, timeout_s: float | None) -> float:
        """For how long to wait at most, in seconds."""
        timeout_s = SWEEP_INTERVAL_S if timeout_s is None else min(timeout_s, SWEEP_INTERVAL_S)
        if self._redis is None:
            timeout_s = min(timeout_s, max(0.0, self._away_until_s - monotonic()))
        return timeout_s

    def read_pushes(self, connections: Collection[Any]) -> None:
        """Reads what Redis tells, if it is over the connection of this source."""
        connection = self._redis
        if connection is None or connection not in connections:
            return
        try:
            while connection.can_read(timeout=0):
                connection.read_response(push_request=True)
        except (redis.RedisError, OSError) as error:
            self._lose(error)

    def wake(self) -> None:
        """Ends a wait; from any thread."""
        self._alarm.wake()
