"""Costs that come closest to what was measured, none of them negative: pure.

A row says how often each cost was paid, divided by what all of them took together: the costs times
the row shall be 1. So errors are relative, a short pass counts as much as a long one, and a pass
that something else held up counts little.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Self

#: What is left of a column, as a share, where the other columns make it up.
DEPENDENT = 1e-9

#: Share of the error that one more cost must explain: between equals, the fewer costs.
WORTH = 0.01


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
