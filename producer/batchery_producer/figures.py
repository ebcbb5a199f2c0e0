"""Figures of a run, for its report: counted as it goes, in memory that does not grow. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Buckets of a histogram for each doubling: a percentile is off by less than a tenth.
PER_DOUBLING = 8

#: The bucket of zero is below all others.
ZERO = -(1 << 20)

#: Most buckets of a timeline; they get twice as wide when there are more.
MOST_BUCKETS = 240

#: First width of a timeline's buckets, in seconds.
FIRST_WIDTH_S = 0.25

#: Kinds of failures that are told apart, and characters that are kept of a message.
MOST_KINDS = 50
MOST_CHARACTERS = 500

#: What the others are called.
OTHER_KINDS = "other kinds"


class Histogram:
    """How numbers from 0 up are distributed: counts by size class, of equal ratio."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums: dict[int, float] = {}
        self.count = 0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float) -> None:
        """Counts one."""
        key = math.floor(math.log2(value) * PER_DOUBLING) if value > 0 else ZERO
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sums[key] = self._sums.get(key, 0.0) + value
        self.count += 1
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    @property
    def mean(self) -> float:
        """Exact; 0 if there is nothing."""
        return sum(self._sums.values()) / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """A number that so many of a hundred do not exceed, nearly; 0 if there is nothing."""
        left = self.count * percent / 100
        for key, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return self._sums[key] / count
        return self.most

    def bars(self, most: int) -> Iterator[tuple[float, float, int]]:
        """From, to and count of each bar, at most so many; those without any are left out."""
        above = sorted(key for key in self._counts if key > ZERO)
        wide = 1
        while above and above[-1] // wide - above[0] // wide >= most:
            wide *= 2
        merged: dict[int, int] = {}
        for key in above:
            merged[key // wide] = merged.get(key // wide, 0) + self._counts[key]
        for key, count in merged.items():
            yield 2 ** (key * wide / PER_DOUBLING), 2 ** ((key + 1) * wide / PER_DOUBLING), count


class Timeline:
    """Counts over time, in buckets that get wider as it goes on."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.counts: list[int] = []

    def add(self, at_s: float) -> None:
        """Counts one.

        Args:
            at_s: Since the start, in seconds.
        """
        while at_s >= self.width_s * MOST_BUCKETS:
            self.width_s *= 2
            pairs = zip(self.counts[::2], [*self.counts[1::2], 0], strict=False)
            self.counts = [sum(pair) for pair in pairs]
        bucket = int(at_s / self.width_s)
        self.counts += [0] * (bucket + 1 - len(self.counts))
        self.counts[bucket] += 1


@dataclass(slots=True)
class Kind:
    """Failures of one kind.

    Attributes:
        name: Of the error's type.
        count: How many there were.
        place: Of the first.
        message: Of the first.
    """

    name: str
    count: int
    place: str
    message: str


class Figures:
    """What happened in a run; times are seconds since its start."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}
        self._kinds: dict[str, Kind] = {}
        #: Rows that were finished, either way.
        self.done = Timeline()
        #: From the moment a job is sent to that at which its result is here, in seconds.
        self.latency = Histogram()
        #: Characters of each item that is a text.
        self.lengths = Histogram()
        #: For each job, items in the batch that it was computed in.
        self.batch_sizes = Histogram()

    def read(self, items: Iterable[Any]) -> None:
        """Notes what is about to be sent, or awaited."""
        for item in items:
            if isinstance(item, str):
                self.lengths.add(len(item))

    def sent(self, at_s: float, task_ids: Sequence[str]) -> None:
        """Notes jobs that are sent; no more than the window has are held."""
        self._sent_s.update(dict.fromkeys(task_ids, at_s))

    def ended(self, at_s: float, task_id: str, batch_size: int) -> None:
        """Notes a job that has ended.

        Args:
            at_s: When.
            task_id: Its own.
            batch_size: How many items shared its batch; 0 if nobody knows.
        """
        sent_s = self._sent_s.pop(task_id, None)
        if sent_s is not None:
            self.latency.add(at_s - sent_s)
        if batch_size:
            self.batch_sizes.add(batch_size)

    def succeeded(self, at_s: float) -> None:
        """Notes a row that has its result."""
        self.done.add(at_s)

    def failed(self, at_s: float, place: str, kind: str, message: str) -> None:
        """Notes a row that has failed, and why."""
        self.done.add(at_s)
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            kind = OTHER_KINDS
        known = self._kinds.setdefault(kind, Kind(kind, 0, place, message[:MOST_CHARACTERS]))
        known.count += 1

    @property
    def kinds(self) -> Sequence[Kind]:
        """The failures by kind, the most frequent first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)
