"""What a forward pass costs, from a few that were measured: pure.

A pass of T tokens over B items takes `token_ms * T + item_ms * B + pass_ms`: what it computes, what
is done for each item, and what it costs however small it is. From the first and the last follows
how many tokens are worth one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

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
    rows = [(point.tokens / point.ms, point.items / point.ms, 1 / point.ms) for point in points]
    costs = _least_squares(rows)
    if costs is None or costs[0] <= 0:
        return None
    errors = [abs(sum(map(_product, zip(row, costs, strict=True))) - 1) for row in rows]
    if max(errors) > MAX_ERROR:
        return None
    token_ms, item_ms, pass_ms = costs
    return Calibration(
        token_ms,
        item_ms,
        pass_ms,
        token_bytes=max(point.peak_bytes / point.tokens for point in points[len(points) // 2 :]),
        measured_tokens=max(point.tokens for point in points),
    )


def _least_squares(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...] | None:
    """The non-negative x for which all rows times x come closest to 1."""
    width = len(rows[0])
    best: tuple[float, tuple[float, ...]] | None = None
    # A negative cost is noise that another term should have had: which one is tried, as three
    # unknowns have few subsets.
    for size in range(1, width + 1):
        for kept in combinations(range(width), size):
            found = _solve([[row[column] for column in kept] for row in rows])
            if found is None or min(found) < 0:
                continue
            full = [0.0] * width
            for column, value in zip(kept, found, strict=True):
                full[column] = value
            error = sum((sum(map(_product, zip(row, full, strict=True))) - 1) ** 2 for row in rows)
            if best is None or error < best[0]:
                best = error, tuple(full)
    return best and best[1]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares by the normal equations; None where the columns are not independent."""
    width = len(rows[0])
    columns = range(width)
    matrix = [
        [*(sum(row[i] * row[j] for row in rows) for j in columns), sum(row[i] for row in rows)]
        for i in columns
    ]
    scale = [matrix[i][i] for i in columns]
    for i in columns:
        pivot = matrix[i][i]
        # What is left of a column that the others make up.
        if pivot <= 1e-9 * scale[i]:
            return None
        matrix[i] = [value / pivot for value in matrix[i]]
        for j in columns:
            if j != i:
                factor = matrix[j][i]
                pairs = zip(matrix[j], matrix[i], strict=True)
                matrix[j] = [value - factor * other for value, other in pairs]
    return [row[-1] for row in matrix]


def _product(pair: tuple[float, float]) -> float:
    return pair[0] * pair[1]
