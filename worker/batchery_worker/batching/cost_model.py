"""What a forward pass costs, from a few that were measured: pure.

A pass of T tokens over B items takes `token_ms * T + item_ms * B + pass_ms`: what it computes, what
is done for each item, and what it costs however small it is. From the first and the last follows
how many tokens are worth one pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, Self

#: What is left of a column, as a share, where the other columns make it up.
DEPENDENT = 1e-9

#: Share of the error that one more cost must explain: between equals, the fewer costs.
WORTH = 0.01

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

#: How often the costs are worked out anew, in batches; before the first time there are none.
REFRESH_BATCHES = 16

#: Share of what a batch counts that is left at the next refresh: half of it after 176 batches.
KEPT = 15 / 16

#: What is believed counts as much as this many batches. Batches that are all alike cannot tell
#: tokens from passes: then it decides. Else it is outvoted, and comes round to what is found.
BELIEF = 0.05

#: A batch that takes so many times as long as expected, or as little, says nothing about its shape.
OUTLIER = 3.0

#: So many of them more than of others: it is not the batches that are odd, but what was expected.
ODD_BATCHES = 8

#: No batch takes less, or more: a nanosecond, eleven days. The clock was set, then.
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9

#: A cost that is believed to be less than this share of the largest one is not believed in.
NEGLIGIBLE = 1e-9


class Sums:
    """Rows added up: all that least squares must know of them."""

    __slots__ = ("_products", "_totals", "_weight")

    def __init__(self, width: int) -> None:
        """No row yet.

        Args:
            width: How many costs there are.
        """
        self._products = [[0.0] * width for _ in range(width)]
        self._totals = [0.0] * width
        self._weight = 0.0

    def add(self, row: Sequence[float], weight: float = 1.0) -> Self:
        """Adds a row, which counts as much as so many."""
        for i, one in enumerate(row):
            products, scaled = self._products[i], weight * one
            for j, other in enumerate(row):
                products[j] += scaled * other
            self._totals[i] += scaled
        self._weight += weight
        return self

    def fade(self, share: float) -> None:
        """Lets all rows so far count for this share of what they did."""
        for products in self._products:
            products[:] = [share * each for each in products]
        self._totals = [share * each for each in self._totals]
        self._weight *= share

    def copy(self) -> "Sums":
        """The same, to add to."""
        copied = Sums(len(self._totals))
        copied._products = [[*products] for products in self._products]
        copied._totals = [*self._totals]
        copied._weight = self._weight
        return copied

    def scale(self, costs: Sequence[float]) -> float:
        """The number by which these costs, multiplied, come closest; 0 where no row says."""
        square = self._square(costs)
        return self._product(costs) / square if square > 0 else 0.0

    def error(self, costs: Sequence[float]) -> float:
        """Sum of the squares of the errors of these costs."""
        return self._square(costs) - 2 * self._product(costs) + self._weight

    def solve(self) -> tuple[float, ...] | None:
        """The non-negative costs that come closest; None where no row says."""
        width = len(self._totals)
        best: tuple[float, tuple[float, ...]] | None = None
        # A negative cost is noise that another one should have had: which is left out, is tried, as
        # few costs have few subsets.
        for size in range(1, width + 1):
            for kept in combinations(range(width), size):
                found = self._solve(kept)
                if found is None or min(found) < 0:
                    continue
                costs = [0.0] * width
                for place, value in zip(kept, found, strict=True):
                    costs[place] = value
                error = self.error(costs)
                if best is None or error < (1 - WORTH) * best[0]:
                    best = error, tuple(costs)
        return best and best[1]

    def _solve(self, kept: Sequence[int]) -> list[float] | None:
        """The normal equations of some costs; None where their columns are not independent."""
        matrix = [[*(self._products[i][j] for j in kept), self._totals[i]] for i in kept]
        for i, scale in enumerate([self._products[i][i] for i in kept]):
            pivot = matrix[i][i]
            if pivot <= DEPENDENT * scale:
                return None
            matrix[i] = [value / pivot for value in matrix[i]]
            for j in range(len(matrix)):
                if j != i:
                    factor = matrix[j][i]
                    pairs = zip(matrix[j], matrix[i], strict=True)
                    matrix[j] = [value - factor * other for value, other in pairs]
        return [row[-1] for row in matrix]

    def _square(self, costs: Sequence[float]) -> float:
        return sum(
            one * sum(product * other for product, other in zip(products, costs, strict=True))
            for products, one in zip(self._products, costs, strict=True)
        )

    def _product(self, costs: Sequence[float]) -> float:
        return sum(total * one for total, one in zip(self._totals, costs, strict=True))


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


class RecentBatches:
    """The batches of one model on one device."""

    def __init__(self, believed: Costs) -> None:
        """Has seen nothing.

        Args:
            believed: What is known beforehand; only how the costs compare matters, and those of
                0 are not believed in. At least one must be more.
        """
        self._believed = believed
        #: The costs as of the last refresh; None before the first.
        self.costs: Costs | None = None
        #: How many batches the costs were worked out from, those that fade included.
        self.batches = 0
        self._sums = Sums(len(Costs._fields))
        self._count = 0
        self._odd = 0
        self._tokens = self._items = 0.0
        #: By what a batch is called odd; None where everything is new.
        self._expected: Costs | None = None
        self._is_first = True

    def ran(self, tokens: int, items: int, passes: int, ms: float) -> bool:
        """Adds a batch that ran without any trouble.

        Args:
            tokens: That were computed, padding included.
            items: That were computed.
            passes: Forward passes.
            ms: What they took together.

        Returns:
            Whether `costs` are new.
        """
        if min(tokens, items, passes) < 1 or not SHORTEST_MS <= ms <= LONGEST_MS:
            return False
        if self._is_first:
            # Kernels are chosen, and memory is asked for, at the first one.
            self._is_first = False
            return False
        if self._is_odd(tokens, items, passes, ms):
            return False
        # Where every item is one token, as of a model that counts none, one cost has it all.
        self._sums.add((tokens / ms, items / ms if items < tokens else 0.0, passes / ms))
        self._tokens += tokens
        self._items += items
        self._count += 1
        return self._count % REFRESH_BATCHES == 0 and self._refresh()

    @property
    def useful_items(self) -> int | None:
        """Items of a pass beyond which throughput hardly grows, if they are as long as lately."""
        if self.costs is None:
            return None
        token_ms, item_ms, pass_ms = self.costs
        each_ms = token_ms * self._tokens / self._items + item_ms
        return max(1, math.ceil(pass_ms / each_ms * (1 - SPARED) / SPARED)) if each_ms > 0 else None

    def _is_odd(self, tokens: int, items: int, passes: int, ms: float) -> bool:
        if self._expected is None:
            return False
        expected_ms = self._expected.expected_ms(tokens, items, passes)
        if expected_ms / OUTLIER <= ms <= expected_ms * OUTLIER:
            self._odd = max(0, self._odd - 1)
            return False
        self._odd += 1
        if self._odd == ODD_BATCHES:
            # What was learned is of another time. The costs stay until there are new ones.
            self._sums = Sums(len(Costs._fields))
            self._count = self._odd = 0
            self._expected = None
        return True

    def _refresh(self) -> bool:
        sums = self._sums.copy()
        level = sums.scale(self._believed)
        believed = Costs(*(level * cost for cost in self._believed))
        for place, cost in enumerate(believed):
            if cost > NEGLIGIBLE * max(believed):
                row = [0.0] * len(believed)
                row[place] = 1 / cost
                sums.add(row, BELIEF)
        found = sums.solve()
        if found is None or not all(map(math.isfinite, found)):
            return False
        self.costs = self._expected = Costs(*found)
        self._believed = Costs(
            *(KEPT * old + (1 - KEPT) * new for old, new in zip(believed, found, strict=True))
        )
        self.batches = self._count
        self._sums.fade(KEPT)
        self._tokens *= KEPT
        self._items *= KEPT
        return True
