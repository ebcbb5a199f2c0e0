"""Where jobs come from that Celery's consumer hands over: by the pipe, without leases.

With brokers other than Redis, and for the devices of tests. The worker keeps the message, and tells
the broker of it.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from batchery.protocol.figures import LeaseFigures, report
from batchery_worker.device.redis_source import Listeners
from batchery_worker.device.stock_consumer import MessageChannel
from batchery_worker.ipc.messages import HISTORY, Fate, Handed, Reply, Settled

#: Longest wait for somebody to wake whoever drives, in seconds.
MAX_WAIT_S = 1.0


class HandedChannel(MessageChannel):
    """What a handed message needs of the channel that brought it."""

    def __init__(self, source: "HandedSource", accept: Collection[str] | None) -> None:
        super().__init__(accept)
        self.source = source

    def basic_ack(self, token: str, multiple: bool = False) -> None:  # noqa: ARG002
        """Tells the worker that a job is settled."""
        self.source.settle(token, Fate.ACKNOWLEDGED)

    def basic_reject(self, token: str, requeue: bool = False) -> None:
        """Has a message dropped, or given back to its queue."""
        self.source.settle(token, Fate.REQUEUED if requeue else Fate.REJECTED)


class HandedSource:
    """The jobs that were handed over to one device; it stands where `RedisSource` stands."""

    lease_store = None
    stores: Sequence[Any] = ()
    is_connected = True
    may_have_more = False
    names: Sequence[str] = ()
    rich_parts: Collection[Any] = ()
    workload: Any = None

    def __init__(self, tell: Callable[[Reply], None], deliver: Callable[[Any], None]) -> None:
        """Has no jobs.

        Args:
            tell: Sends a message to the worker; from any thread.
            deliver: Takes in a message, as kombu reads it from a queue.
        """
        #: Nobody is told anything: there are no leases.
        self.listeners = Listeners()
        self._tell = tell
        self._deliver = deliver
        self._handed: deque[Handed] = deque()
        self._woken = threading.Event()

    def open_channel(self, accept: Collection[str] | None) -> HandedChannel:
        """What the messages need of a channel."""
        return HandedChannel(self, accept)

    def put(self, handed: Handed) -> None:
        """Takes a job; from any thread."""
        self._handed.append(handed)
        self.wake()

    def settle(self, token: str, fate: str) -> None:
        """Tells the worker what became of a job; from any thread."""
        self._tell(Settled(token, fate))

    def forget_waiting(self) -> None:
        """Gives back the jobs that nobody has read."""
        while self._handed:
            self.settle(self._handed.popleft().token, Fate.FORGOTTEN)

    # As of `RedisSource`

    def connect(self) -> bool:
        """There is nothing to connect to."""
        return True

    def ask(self) -> bool:
        """Whether any job is here."""
        return bool(self._handed)

    def ask_ahead(self) -> None:
        """Does nothing: they come by themselves."""

    def read(self) -> list[Handed]:
        """The jobs that are here."""
        return [self._handed.popleft() for _ in range(len(self._handed))]

    def take_in(self, answer: list[Handed]) -> None:
        """Hands over what was read."""
        for handed in answer:
            properties = {
                **handed.raw["properties"],
                "delivery_tag": handed.token,
                HISTORY: handed,
            }
            self._deliver({**handed.raw, "properties": properties})

    def dead_letter(self, token: str, error: Exception) -> None:  # noqa: ARG002 - as the other one
        """Drops a message that cannot be understood."""
        self.settle(token, Fate.REJECTED)

    def find_queue(self, key: str) -> str:
        """The queue of a key."""
        return key

    def select_queues(self, queues: Sequence[str]) -> None:
        """Does nothing: Celery's consumer has them."""

    def return_due(self) -> None:
        """Does nothing: they wait in this process."""

    def describe(self) -> None:
        """Does nothing: there are no others who take jobs from it."""

    def figures(self) -> dict[str, Any]:
        """There are no leases."""
        none: dict[str, Any] = report(LeaseFigures())
        return none

    def flush(self) -> None:
        """Does nothing: the worker is told at once."""

    def close(self) -> None:
        """Does nothing: the worker knows what is left."""

    def wait(self, timeout_s: float | None, is_due: Callable[[], bool]) -> None:
        """Waits until somebody wakes it, or the time is over, in seconds; None for a second."""
        if not is_due() and not self._handed:
            self._woken.wait(MAX_WAIT_S if timeout_s is None else min(timeout_s, MAX_WAIT_S))
        self._woken.clear()

    def wake(self) -> None:
        """Ends a wait; from any thread."""
        self._woken.set()
