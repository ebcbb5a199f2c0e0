"""A leasing channel whose kombu and whose Redis are stand-ins, which keep what they are asked for.

All states of the channel are real: it fetches, waits for a change, or has no room.
"""

from collections.abc import Callable, Iterator
from queue import Empty
from types import SimpleNamespace
from typing import Any

import redis

from batchery.transport.channel import LeasingChannel
from batchery.transport.inbox import Capacity
from batchery.transport.leases import HeldJob, Leases
from batchery.transport.redis_schema import Keys


class Connection:
    """A connection to Redis, whose socket changes when it is made anew."""

    def __init__(self) -> None:
        self._sock = 1
        self.pushes_read = 0

    def disconnect(self) -> None:
        self._sock += 1

    def read_response(self, push_request: bool = False) -> None:
        assert push_request
        self.pushes_read += 1


class Transport:
    """Kombu's connection to the broker."""

    def __init__(self) -> None:
        self.client: Any = self
        self._callbacks: dict[str, Callable[[Any], None]] = {}
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


class Client:
    """Redis, for single commands."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.connection_pool: Any = None
        self.name = ""
        self.is_away = False

    def client_setname(self, name: str) -> None:
        if self.is_away:
            raise redis.ConnectionError("away")
        self.name = name


class KombuChannel:
    """Kombu's part of the channel."""

    ack_emulation = True
    priority_steps = (0, 3)
    global_keyprefix = "shop-"
    connection_errors = (redis.ConnectionError, OSError)
    closed = False

    def __init__(self) -> None:
        self.connection: Any = Transport()
        self.redis = Connection()
        self.client: Any = Client(self.redis)
        self.active_fanout_queues: set[str] = set()
        self._fanout_queues: dict[str, tuple[str, str]] = {}
        self._in_poll: Any = None
        #: What was left to kombu.
        self.stock: list[str] = []
        self.consumed: list[str] = []

    def typeof(self, exchange: str) -> SimpleNamespace:
        return SimpleNamespace(type="fanout" if exchange == "fanout" else "direct")

    def _brpop_start(self, timeout: float | None) -> None:
        self.stock.append("start")

    def _brpop_read(self, **options: Any) -> bool:
        self.stock.append("read")
        return True

    def _flush_brpop_reauth(self) -> None:
        self.stock.append("reauth")

    def _on_connection_disconnect(self, connection: Any) -> None:
        self.stock.append("disconnect")

    def basic_consume(self, queue: str, *_: Any, **__: Any) -> str:
        self.consumed.append(queue)
        return "tag"

    def basic_cancel(self, tag: str) -> str:
        self.consumed.clear()
        return tag

    def close(self) -> None:
        self.closed = True

    def _q_for_pri(self, queue: str, pri: int) -> str:
        return f"{queue}\x06{pri}" if pri else queue

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        return {"socket_timeout": None, "host": "h", "port": 1, "db": 0}


class Inbox:
    """Messages that were handed over."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.reconciled = 0
        self.dead: list[str] = []

    def take_in(self, answer: Any, keys: Any) -> None:
        self.taken.append(answer)

    def reconcile(self) -> None:
        self.reconciled += 1

    def dead_letter(self, tag: str, error: Exception) -> None:
        self.dead.append(tag)

    def find_place(self, key: str) -> tuple[str, int]:
        name, _, step = key.removeprefix("shop-").partition("\x06")
        return name, int(step or 0)


class Fetcher:
    """Asks for messages; the test says what is answered."""

    def __init__(self) -> None:
        #: What each fetch noted, or not.
        self.asked: list[bool] = []
        self.has_room = True
        #: What is read next: an answer, or an error to raise.
        self.answer: Any = []
        self.took_all = False
        self.watches = True
        self.left_some_out = False
        self.is_entered = False
        self.is_empty = True
        self.known_capacity = Capacity()
        self.prepared = 0
        self.keys = ("shop-q",)

    def ask(self, connection: Any, *, may_note: bool) -> bool:
        if self.has_room:
            self.asked.append(may_note)
        return self.has_room

    def prepare(self, connection: Any) -> None:
        self.prepared += 1

    def read(self, connection: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def nothing_came(self, connection: Any) -> bool:
        return self.is_empty

    def forget_entry(self) -> None:
        self.is_entered = False


class Store:
    """The leases of the worker."""

    def __init__(self) -> None:
        self.keys = Keys("shop-")
        self.leases = Leases()
        self.fenced = False
        self.running_batches = SimpleNamespace(are_some=False)
        self.holder: Any = "channel"
        self.heartbeat: Any = SimpleNamespace(stop=lambda: self.calls.append("stop"))
        self.calls: list[str] = []
        self.waiting: Any = False
        self.given: list[tuple[HeldJob, str]] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    def stop_waiting(self) -> None:
        self.calls.append("stop_waiting")

    def rejoin(self) -> int:
        self.fenced = False
        return 0

    def others_wait(self) -> Any:
        if isinstance(self.waiting, Exception):
            raise self.waiting
        return self.waiting

    def give_to_waiting(self, jobs: Iterator[tuple[HeldJob, str]]) -> set[str]:
        self.given = list(jobs)
        return {job.token for job, _ in self.given}


class QoS:
    """Counts messages; those whose tags are numbers are leased."""

    def __init__(self) -> None:
        self.counted: list[str] = []
        self.acknowledged: list[str] = []

    def is_leased(self, tag: str) -> bool:
        return tag.isdigit()

    def append(self, message: Any, tag: str) -> None:
        self.counted.append(tag)

    def ack(self, tag: str) -> None:
        self.acknowledged.append(tag)


class Channel(LeasingChannel, KombuChannel):
    """A leasing channel on these stand-ins."""

    qos: Any
    fetcher: Any
    inbox: Any
    lease_store: Any
    workload: Any

    def __init__(self) -> None:
        super().__init__()
        self.qos = QoS()

    def lease(self) -> None:
        """What `basic_consume` does with a real Redis."""
        self.lease_store, self.inbox, self.fetcher = Store(), Inbox(), Fetcher()

    def _open_lease_store(self) -> None:
        self.lease()

    # What kombu's poller sees

    @property
    def state(self) -> str:
        if self._in_poll is None:
            return "asks next"
        return "fetches" if self._fetching else "waits"

    def turn(self) -> None:
        """Kombu's poller asks where nothing is under way."""
        if self._in_poll is None:
            self._brpop_start()

    def read(self) -> bool:
        """Kombu's poller reads, as the connection is readable; False if nothing came."""
        try:
            return self._brpop_read()
        except Empty:
            return False

    def wait(self) -> "Channel":
        """Waits for a change, as an idle worker does."""
        self.fetcher.answer, self.fetcher.took_all = [], True
        self.turn()
        assert not self.read()
        assert self.state == "waits"
        self.fetcher.asked.clear()
        return self


class Workload:
    """The jobs of a worker."""

    def __init__(self) -> None:
        self.handed_over = 0
        self.room = Capacity()

    def capacity(self) -> Capacity:
        return self.room

    def hand_over(self, take_in: Callable[[], None]) -> None:
        self.handed_over += 1
        take_in()
