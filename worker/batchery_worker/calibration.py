"""What a forward pass costs, from a few that were measured: pure.

A pass of T tokens over B items takes `token_ms * T + item_ms * B + pass_ms`: what it computes, what
is done for each item, and what it costs however small it is. From the first and the last follows
how many tokens are worth one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchery_worker.least_squares import Sums

#: Share of the highest throughput that a calibrated budget may give away: a pass of 19 times what
#: it costs beside its tokens reaches 95 %.
SPARED = 0.05

#: Share of the free memory that a pass may take: other processes have some, and fragments.
MEMORY_SHARE = 0.8

#: Least budget, in tokens: one text of the usual limit.
MIN_TOKENS = 512

#: Measurements without which nothing is fitted: one more than there are unknowns.
MIN_POINTS = 4

#: Largest error of the fit at any point, as a share of what was measured; beyond that the machine
#: was busy with something else, and no budget follows from it.
MAX_ERROR = 0.5


class Costs(NamedTuple):
    """What forward passes cost: for each token, for each item, and for each pass beside them."""

    token_ms: float
    item_ms: float
    pass_ms: float

    def expected_ms(self, tokens: int, items: int, passes: int = 1) -> float:
        """What so much takes; never negative."""
        return self.token_ms * tokens + self.item_ms * items + self.pass_ms * passes


@dataclass(frozen=True, slots=True)
class Point:
    """One shape that was measured."""

    tokens: int
    items: int
    ms: float
    #: Memory beyond what was held before; 0 where nobody counts it.
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found for one model on one device."""

    token_ms: float
    item_ms: float
    pass_ms: float
    #: Memory that a pass takes per token; 0 where nobody counts it.
    token_bytes: float
    #: Most tokens of a pass that was measured, and fitted.
    measured_tokens: int

    @property
    def costs(self) -> Costs:
        """The three of them together."""
        return Costs(self.token_ms, self.item_ms, self.pass_ms)

    @property
    def pass_tokens(self) -> float:
        """What a pass costs beside its tokens and items, in tokens."""
        return self.pass_ms / self.token_ms

    def max_batch_tokens(self, free_bytes: int | None) -> int:
        """The budget beyond which throughput hardly grows, as far as memory and measurement go.

        Args:
            free_bytes: What a pass could take; None if nobody knows.
        """
        wanted = self.pass_tokens * (1 - SPARED) / SPARED
        tokens = min(max(int(wanted), MIN_TOKENS), max(self.measured_tokens, MIN_TOKENS))
        if free_bytes is None or not self.token_bytes:
            return tokens
        return max(1, min(tokens, int(MEMORY_SHARE * free_bytes / self.token_bytes)))


def calibrate(points: Sequence[Point]) -> Calibration | None:
    """Fits the costs to what was measured, by least squares of relative errors.

    Args:
        points: Of several lengths and several numbers of items.

    Returns:
        None where the points are too few, too alike, or fit no such costs.
    """
    if len(points) < MIN_POINTS:
        return None
    sums = Sums(len(Costs._fields))
    for point in points:
        sums.add((point.tokens / point.ms, point.items / point.ms, 1 / point.ms))
    found = sums.solve()
    if found is None or found[0] <= 0:
        return None
    costs = Costs(*found)
    errors = [abs(costs.expected_ms(each.tokens, each.items) / each.ms - 1) for each in points]
    if max(errors) > MAX_ERROR:
        return None
    return Calibration(
        *costs,
        token_bytes=max(point.peak_bytes / point.tokens for point in points[len(points) // 2 :]),
        measured_tokens=max(point.tokens for point in points),
    )
