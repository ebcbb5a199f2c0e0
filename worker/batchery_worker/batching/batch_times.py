"""How long batches take, learned from those that ran, and when the next one is sent: pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median

#: A batch of so many seconds is long: a job behind it would rather begin on another worker.
LONG_BATCH_S = 0.2

#: Behind a batch of fewer seconds the next one is sent at once: the event loop is not that exact.
SHORT_BATCH_S = 0.02

#: How many batches of one kind are remembered.
REMEMBERED = 8

#: The next batch is sent when this share of a long batch is left, so that it can be prepared.
LEAD_SHARE = 0.25

#: The same, as a multiple of the longest preparation.
LEAD_PREPARATIONS = 2.0

#: After so many times the longest time of late nobody knows when a batch ends.
OVERDUE_FACTOR = 1.5

#: Batches of each task that a device holds ahead of short ones; else it is one.
AHEAD_BATCHES = 2


@dataclass(slots=True)
class _Times:
    """Recent batches of one kind, in seconds."""

    run_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    prepare_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class BatchTimes:
    """The times of a device's batches, by task and rough size."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int], _Times] = {}
        #: Seconds that the last batches of each task took.
        self._last_s: dict[str, deque[float]] = {}

    def are_short(self, tasks: Iterable[str]) -> bool:
        """Whether most batches of late were short, of each of some tasks that have all run."""
        return all(
            task in self._last_s and median(self._last_s[task]) < LONG_BATCH_S for task in tasks
        )

    def ran(self, task: str, items: int, run_s: float, prepare_s: float) -> None:
        """Adds a batch.

        Args:
            task: Name of the task.
            items: Number of items.
            run_s: From the moment when it was the first of its device, to its end.
            prepare_s: How long it took to prepare it, which may have been before.
        """
        times = self._times.setdefault((task, _size_class(items)), _Times())
        times.run_s.append(run_s)
        times.prepare_s.append(prepare_s)
        self._last_s.setdefault(task, deque(maxlen=REMEMBERED)).append(run_s)

    def next_s(self, task: str, items: int, began_s: float) -> float:
        """When the batch behind a batch should be sent: it cannot go to another worker after that.

        Where they are short, that is at once. While nothing is known of such batches, it is when
        the batch has ended: it may be long. The shortest one of late counts: a device that ends
        before that has nothing to do.

        Args:
            task: Task of the batch that runs.
            items: Its number of items.
            began_s: When it was the first of its device.
        """
        times = self._find(task, items)
        if times is None:
            return inf
        expected_s = min(times.run_s)
        if expected_s < SHORT_BATCH_S:
            return began_s
        lead_s = max(LEAD_SHARE * expected_s, LEAD_PREPARATIONS * max(times.prepare_s))
        return began_s + max(0.0, expected_s - lead_s)

    def ends_soon(self, task: str, items: int, began_s: float, now_s: float) -> bool:
        """Whether a batch is near its end, so that the next one is wanted.

        Of a kind of which nothing is known, nobody can say.

        Args:
            task: Task of the batch that runs.
            items: Its number of items.
            began_s: When it was the first of its device.
            now_s: The time.
        """
        times = self._find(task, items)
        if times is None or now_s > began_s + OVERDUE_FACTOR * max(LONG_BATCH_S, *times.run_s):
            return False
        is_short = min(times.run_s) < LONG_BATCH_S
        return is_short or now_s >= self.next_s(task, items, began_s)

    def _find(self, task: str, items: int) -> _Times | None:
        return self._times.get((task, _size_class(items)))


def _size_class(items: int) -> int:
    """The same number for batches up to the same power of two."""
    return (items - 1).bit_length()
