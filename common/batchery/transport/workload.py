"""What a worker tells its channel of the jobs that it holds, so that others may have some of them.

A worker that finds its queues empty, and could begin a job at once, enters itself in Redis as
waiting. While it is there, other workers take only what they could begin at once themselves, and
give back what they only hold.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Capacity(NamedTuple):
    """How many jobs a worker could begin at once, besides those that it holds."""

    batch: int = 0
    ordinary: int = 0

    @property
    def total(self) -> int:
        """Jobs of either kind."""
        return self.batch + self.ordinary


class HeldJob(NamedTuple):
    """A job that a worker holds and has not begun."""

    token: str
    #: Whether it is the job of a batch task.
    is_batch: bool


class Workload(Protocol):
    """The jobs of a worker, as its pool knows them; for the event loop's thread."""

    @property
    def leaves_rest(self) -> bool:
        """Whether the worker leaves to others that wait what it could not begin at once."""

    def capacity(self) -> Capacity:
        """How many jobs the worker could begin at once."""

    def capacity_for(self, queue: str) -> Capacity:
        """The same, without the kind of jobs that do not come by this queue."""

    def limit_for(self, queue: str, level: int) -> int | None:
        """How many more jobs of a queue and priority class to take.

        Args:
            queue: Name of the queue.
            level: First priority of the class.

        Returns:
            None for no other limit than the prefetch.
        """

    def on_turn(self) -> None:
        """Called in each turn of the loop."""

    def on_answer(self) -> None:
        """Called when an answer was read: a push of who waits may have come in front of it."""

    def gather(self, take_in: Callable[[], None]) -> None:
        """Calls what hands over the messages of a fetch; what can begin then begins at once."""

    def on_waiting(self) -> None:
        """Called when other workers may have begun to wait for work."""


def encode_entry(capacity: Capacity, queues: Mapping[str, Capacity]) -> str:
    """What Redis is told of a worker that waits; empty if it could begin nothing.

    Args:
        capacity: Its capacity.
        queues: Its capacity for the jobs of each queue, by the queue's key.
    """
    kinds = {
        key: (each.batch > 0) + 2 * (each.ordinary > 0)
        for key, each in queues.items()
        if each.total > 0
    }
    return json.dumps([*capacity, kinds]) if kinds else ""
