"""How the time of a device was divided, over every window of some length: pure.

A batch that has items of several lanes is shared out by their numbers. Within a batch each lane's
time grows evenly. So the time that a lane had until a moment is a line with corners where batches
begin and end, and the greatest deviation over any window is found at such a corner: exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Line = NDArray[np.float64]


class Ran(NamedTuple):
    """A batch that ran, on any clock in seconds."""

    begin_s: float
    end_s: float
    #: Items by lane.
    items: Mapping[str, int]

    @property
    def size(self) -> int:
        """All its items."""
        return sum(self.items.values())

    @property
    def seconds(self) -> float:
        """How long it had the device."""
        return self.end_s - self.begin_s

    def seconds_of(self, lane: str) -> float:
        """A lane's part of that."""
        return self.seconds * self.items.get(lane, 0) / self.size


@dataclass(frozen=True, slots=True)
class Deviation:
    """The most by which a lane was off its share in any window."""

    #: More or less device time than its share of the window's, in seconds; its sign says which.
    seconds: float
    #: The same in items of the lane.
    items: float
    #: When that window begins, in seconds after the first batch.
    begin_s: float


def deviations(
    batches: Sequence[Ran], shares: Mapping[str, float], window_s: float
) -> dict[str, Deviation]:
    """The greatest deviation of each lane.

    Args:
        batches: Of one device, as they ran.
        shares: Of the lanes that wait all the time; only the ratios count.
        window_s: Length of a window, in seconds.
    """
    corners = np.array([at_s for each in batches for at_s in (each.begin_s, each.end_s)])
    first_s, last_s = corners[0], corners[-1] - window_s
    starts = np.concatenate([corners, corners - window_s])
    starts = starts[(starts >= first_s) & (starts <= last_s)]
    if not len(starts):
        raise ValueError(f"the batches take less than a window of {window_s:g} s")
    had = {lane: _in_windows(batches, corners, lane, starts, window_s) for lane in shares}
    everything = sum(had.values(), start=np.zeros(len(starts)))
    total = sum(shares.values())
    found = {}
    for lane, share in shares.items():
        off = had[lane] - everything * (share / total)
        worst = int(np.argmax(np.abs(off)))
        seconds, begin_s = float(off[worst]), float(starts[worst] - first_s)
        found[lane] = Deviation(seconds, seconds / item_s(batches, lane), begin_s)
    return found


def _in_windows(
    batches: Sequence[Ran], corners: Line, lane: str, starts: Line, window_s: float
) -> Line:
    grown = np.cumsum([each.seconds_of(lane) for each in batches])
    # Nothing is added between two batches.
    before = np.concatenate([[0.0], grown[:-1]])
    line = np.column_stack([before, grown]).ravel()
    inside: Line = np.interp(starts + window_s, corners, line) - np.interp(starts, corners, line)
    return inside


def item_s(batches: Sequence[Ran], lane: str) -> float:
    """Mean device time of an item of a lane, in seconds."""
    items = sum(each.items.get(lane, 0) for each in batches)
    return sum(each.seconds_of(lane) for each in batches) / max(1, items) or 1.0


def by_second(batches: Sequence[Ran], lanes: Sequence[str]) -> list[dict[str, Any]]:
    """Share of each lane, and how busy the device was, in each whole second after the first batch.

    A batch counts where it began, and where it ended, by its parts.
    """
    corners = np.array([at_s for each in batches for at_s in (each.begin_s, each.end_s)])
    starts = np.arange(corners[0], corners[-1] - 1.0, 1.0)
    had = {lane: _in_windows(batches, corners, lane, starts, 1.0) for lane in lanes}
    rows = []
    for second in range(len(starts)):
        busy_s = float(sum(had[lane][second] for lane in lanes))
        shares = {lane: round(float(had[lane][second]) / (busy_s or 1.0), 4) for lane in lanes}
        rows.append({"second": second, "busy": round(busy_s, 4), **shares})
    return rows
