"""Least squares for three costs, none of them negative: pure Python, no numpy.

The main process of a worker needs it, too, and has no numpy. For three columns, it is also faster.
"""

import math
from collections.abc import Sequence
from itertools import combinations

#: Share of the error that one more cost must explain: between equals, fewer costs win.
MIN_GAIN = 0.01

#: What is left of a column once others have explained it: below this share it is one of them.
SINGULAR_SHARE = 1e-9

#: Products of three columns, and of the one that they must add up to, with each other.
Products = Sequence[Sequence[float]]

#: Every choice of columns, small ones first.
_CHOICES = [kept for size in (1, 2, 3) for kept in combinations(range(3), size)]


def non_negative_fit(products: Products) -> list[float] | None:
    """The non-negative costs with the smallest error; None if there are none.

    Args:
        products: Of all columns with each other, summed over all rows.
    """
    least_pivots = [SINGULAR_SHARE * products[place][place] for place in range(3)]
    #: What each choice of columns leaves unexplained. None if one of them explains nothing that
    #: the others do not: then a smaller choice does as well.
    left: dict[tuple[int, ...], Products | None] = {(): products}
    costs, least_error = None, math.inf
    # A negative cost is noise that another cost should have had. So each choice is tried.
    for kept in _CHOICES:
        before, place = left[kept[:-1]], kept[-1]
        if before is None or before[place][place] <= least_pivots[place]:
            left[kept] = None
            continue
        rest = left[kept] = _explained(before, place)
        found = [rest[each][3] for each in kept]
        # Rounding may leave less than nothing.
        error = max(0.0, rest[3][3])
        if min(found) >= 0 and error < (1 - MIN_GAIN) * least_error:
            costs, least_error = [0.0] * 3, error
            for each, cost in zip(kept, found, strict=True):
                costs[each] = cost
    return costs if costs is not None and all(map(math.isfinite, costs)) else None


def distinct_share(products: Products, place: int) -> float:
    """The share of a column that the other two do not explain, whatever they cost: 0 to 1."""
    rest = products
    for other in {0, 1, 2} - {place}:
        if rest[other][other] > SINGULAR_SHARE * products[other][other]:
            rest = _explained(rest, other)
    whole = products[place][place]
    return max(0.0, rest[place][place] / whole) if whole else 0.0


def _explained(products: Products, place: int) -> Products:
    """What is left of the products when one more column is explained: a Gauss-Jordan step.

    After it, the last column has the costs of the explained columns, and below them the error.
    """
    pivot = products[place][place]
    first, second, third, goal = pivot_row = [each / pivot for each in products[place]]
    rest = []
    for row in products:
        factor = row[place]
        one, two, three, four = row
        rest.append(
            [
                one - factor * first,
                two - factor * second,
                three - factor * third,
                four - factor * goal,
            ]
        )
    rest[place] = pivot_row
    return rest
