"""A source of jobs whose queues are in several shards of a cluster: one source for each."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from celery import Celery

from batchery.protocol.figures import LeaseFigures, report
from batchery.shards import Shard, shard_of
from batchery.transport.lease_store import LeaseStore
from batchery_worker.device.fetcher import Part, Workload
from batchery_worker.device.inbox import Taken
from batchery_worker.device.redis_source import Alarm, Listeners, RedisSource
from batchery_worker.device.stock_consumer import LeaseChannel


class ShardedSource:
    """Asks all shards at once, and hands over what each of them brings, in turn.

    Whoever drives it sees one source. A shard that is away holds up no other one.
    """

    def __init__(self, app: Celery, make: Callable[..., RedisSource], names: Sequence[str]) -> None:
        """Does not connect yet.

        Args:
            app: The app.
            make: Makes the source of some queues; takes their names, their places by number, and
                the alarm of all sources.
            names: Names of all queues.
        """
        self._app = app
        self._make = make
        self.listeners = Listeners()
        self._alarm = Alarm()
        self._sources: dict[Shard, RedisSource] = {}
        #: Those that were asked and whose answer was not read, and all that were asked with them.
        self._asked: list[RedisSource] = []
        self._round: list[RedisSource] = []
        self._workload: Workload | None = None
        self.names: list[str] = []
        self.select_queues(names)
        #: The one whose messages are handed over.
        self._current = next(iter(self._sources.values()))

    def select_queues(self, names: Sequence[str]) -> None:
        """Takes from other queues from now on."""
        self.names = list(names)
        by_shard: dict[Shard, list[str]] = {shard: [] for shard in self._sources}
        for name in names:
            by_shard.setdefault(shard_of(self._app, name), []).append(name)
        for shard, own in by_shard.items():
            if shard in self._sources:
                self._sources[shard].select_queues(own)
            else:
                made = self._make(own, {shard.number: shard}, self._alarm)
                made.listeners, made.workload = self.listeners, self._workload
                self._sources[shard] = made

    @property
    def workload(self) -> Workload | None:
        """Says how much is wanted of each queue."""
        return self._workload

    @workload.setter
    def workload(self, workload: Workload) -> None:
        self._workload = workload
        for each in self._sources.values():
            each.workload = workload

    # Connecting

    def connect(self) -> bool:
        """Makes sure that shards take this device for a holder; whether one of them does."""
        are_connected = [each.connect() for each in self._sources.values()]
        return any(are_connected)

    @property
    def is_connected(self) -> bool:
        """Whether a shard has answered the last time."""
        return any(each.is_connected for each in self._sources.values())

    @property
    def stores(self) -> Sequence[LeaseStore]:
        """The leases with all shards that have answered."""
        return [store for each in self._sources.values() for store in each.stores]

    @property
    def lease_store(self) -> LeaseStore | None:
        """The leases with the shard whose messages are handed over."""
        return self._current.lease_store

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken."""
        for each in self._sources.values():
            each.prepare_anew()

    def fence(self, holder: str) -> None:
        """Notes that others have the leases of a holder; from any thread."""
        for each in [*self._sources.values()]:
            each.fence(holder)

    def close(self) -> None:
        """Gives back what is left, and leaves Redis."""
        for each in self._sources.values():
            each.close()

    # Taking

    def open_channel(
        self, accept: Collection[str] | None, store: LeaseStore | None = None
    ) -> LeaseChannel:
        """What messages with leases in a store need of a channel."""
        return self._current.open_channel(accept, store)

    def ask_ahead(self) -> None:
        """Asks those shards before a batch runs that have more."""
        for each in self._sources.values():
            each.ask_ahead()

    def ask(self) -> bool:
        """Sends the question which messages there are to all shards; False if to none."""
        if not self._asked:
            self._round = list(filter(self._ask, self._sources.values()))
            self._asked = [*self._round]
        return bool(self._asked)

    def _ask(self, source: RedisSource) -> bool:
        # After a lost connection it first hands over what it has leases of.
        self._current = source
        return source.ask()

    def read(self) -> Any:
        """Reads the next answer; empty if there is nothing."""
        self._current = self._asked.pop(0)
        return self._current.read()

    @property
    def may_have_more(self) -> bool:
        """Whether answers are to be read, or the last ones do not say that the lists are empty."""
        return bool(self._asked) or any(each.may_have_more for each in self._round)

    @property
    def rich_parts(self) -> Collection[Part]:
        """Queues and classes of which there is probably more in Redis."""
        return {part for each in self._sources.values() for part in each.rich_parts}

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the question of the last answer was about."""
        return self._current.keys

    def take_in(self, answer: Any) -> None:
        """Hands over what was brought."""
        self._current.take_in(answer)

    def hand_over(self, taken: Taken) -> None:
        """Hands one message over."""
        self._current.hand_over(taken)

    def dead_letter(self, token: str, error: Exception) -> None:
        """Makes a dead letter of a message that cannot be understood; while it is handed over."""
        self._current.dead_letter(token, error)

    def find_queue(self, key: str) -> str:
        """The queue of a key, which may be that of any of its lists."""
        return self._source_of(key).find_queue(key)

    def find_like(self, key: str, name: str) -> str:
        """The list of a name that has the priority step of a key."""
        return self._source_of(key).find_like(key, name)

    def _source_of(self, key: str) -> RedisSource:
        return next(each for each in self._sources.values() if each.has_key(key))

    # Settling

    def flush(self) -> None:
        """Sends what was acknowledged, to the shards that are there."""
        for each in self._sources.values():
            each.flush()

    def return_due(self) -> None:
        """Gives the jobs back to the queues of this device whose time will soon have come."""
        for each in self._sources.values():
            each.return_due()

    def describe(self) -> None:
        """Tells others, through Redis, how much this device holds of each queue."""
        for each in self._sources.values():
            each.describe()

    def figures(self) -> Mapping[str, Any]:
        """What `celery inspect batchery` shows of the leases, of all shards together."""
        total: dict[str, Any] = report(LeaseFigures())
        for store in self.stores:
            total["held"] += len(store.leases)
            for name, took in list(store.scripts.times.items()):
                known = total["scripts"].setdefault(name, {"calls": 0, "seconds": 0.0})
                for figure, value in asdict(took).items():
                    known[figure] += value
        return total

    # Waiting

    def wait(self, timeout_s: float | None, is_due: Callable[[], bool]) -> None:
        """Waits until a shard tells of a change, somebody wakes it, or the time is over."""
        sources = [*self._sources.values()]
        limit_s = min(each.limit_wait_s(timeout_s) for each in sources)
        watched = [connection for each in sources for connection in each.watched]
        found = self._alarm.wait(watched, limit_s, is_due)
        for each in sources:
            each.read_pushes(found)

    def wake(self) -> None:
        """Ends a wait; from any thread."""
        self._alarm.wake()
