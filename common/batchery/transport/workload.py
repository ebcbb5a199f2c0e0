"""What a worker tells its channel of the jobs that it holds, so that others may have some of them.

A worker that finds its queues empty, and could begin a job at once, enters itself in Redis as
waiting. While it is there, other workers give back what they only hold.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Capacity(NamedTuple):
    """How many jobs a worker could begin at once, besides those that it holds."""

    batch: int = 0
    ordinary: int = 0


class HeldJob(NamedTuple):
    """A job that a worker holds and has not begun."""

    token: str
    #: Whether it is the job of a batch task.
    is_batch: bool


class Workload(Protocol):
    """The jobs of a worker, as its pool knows them; for the event loop's thread."""

    def capacity(self) -> Capacity:
        """How many jobs the worker could begin at once."""

    def find_kinds(self, queue: str) -> int:
        """Which jobs come by a queue: 1 for batch jobs, 2 for ordinary ones, 3 for both."""

    def limit_for(self, queue: str, level: int) -> int | None:
        """How many more jobs of a queue and priority class to take.

        Args:
            queue: Name of the queue.
            level: First priority of the class.

        Returns:
            None for no other limit than the prefetch.
        """

    def hand_over(self, take_in: Callable[[], None]) -> None:
        """Calls what hands over the messages of a fetch; what can begin then begins at once."""


def encode_entry(capacity: Capacity, kinds: Mapping[str, int]) -> str:
    """What Redis is told of a worker that waits; empty if it could begin nothing.

    Args:
        capacity: Its capacity.
        kinds: Which jobs come by each queue, by the queue's key: see `Workload.find_kinds`.
    """
    free = (capacity.batch > 0) + 2 * (capacity.ordinary > 0)
    wanted = {key: kinds & free for key, kinds in kinds.items() if kinds & free}
    return json.dumps([*capacity, wanted]) if wanted else ""
