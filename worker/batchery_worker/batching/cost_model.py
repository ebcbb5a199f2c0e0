"""What forward passes cost, learned from the batches that ran: pure.

A device has a model of tokens, items and passes; a worker's main process has one for each task, of
items only. The fit is by least squares for three costs, none of them negative, in pure Python: the
main process has no numpy, and for three columns it is also faster.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from operator import mul
from typing import Any, NamedTuple

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


#: How often the costs are fitted anew, in batches. Before the first time, what is believed is only
#: scaled to the mean of the batches.
REFRESH_BATCHES = 16

#: Weight that is left of a batch at the next refresh: half of it after 176 batches.
KEPT_SHARE = 15 / 16

#: Weight of what is believed, in batches. Batches that are all alike cannot tell tokens from
#: passes: then the belief decides. Otherwise it is outvoted.
BELIEF_WEIGHT = 0.05

#: The belief drifts to what is found, if tokens and items leave this share of the passes
#: unexplained. Batches of mixed sizes leave a fifth. Full ones leave a fiftieth: there a machine
#: that is busier now and then passes for a cost.
MIN_DISTINCT_SHARE = 0.05

#: A batch that takes so many times as long as expected, or as little, says nothing about its shape.
OUTLIER_FACTOR = 3.0

#: After so many more outliers than other batches the costs have changed, and are learned anew.
MAX_OUTLIERS = 8

#: Range of a credible time of a batch: a nanosecond to eleven days. Beyond it the clock was set.
MIN_MS, MAX_MS = 1e-6, 1e9

#: Believed costs that are smaller than this share of the others count as 0.
NEGLIGIBLE_SHARE = 1e-9

#: Share of the highest throughput that a batch of `useful_items` gives away: a pass of 19 times
#: what it costs besides its tokens reaches 95 %.
SPARED_SHARE = 0.05

#: Weight of the latest prediction in the mean error: half of it is of the last eleven batches.
ERROR_WEIGHT = 1 / 16

#: Mean relative error up to which predictions are believed, and from which they no longer are.
#: Between the two nothing changes, so that plans do not change with every slow batch.
GOOD_ERROR, BAD_ERROR = 0.25, 0.4


class Costs(NamedTuple):
    """What forward passes cost: for each token, for each item, and for each pass besides."""

    token_ms: float
    item_ms: float
    pass_ms: float

    def expected_ms(self, tokens: int, items: int, passes: int = 1) -> float:
        """How long a batch takes; never negative."""
        return self.token_ms * tokens + self.item_ms * items + self.pass_ms * passes


class CostModel:
    """The costs of one model on one device, or of one batch function.

    A batch takes `token_ms * tokens + item_ms * items + pass_ms * passes`. The three costs are the
    non-negative ones with the smallest squares of relative errors, over all batches; older batches
    count less and less. Whatever has no tokens counts each item as one.
    """

    def __init__(self, believed: Costs) -> None:
        """Has seen no batch.

        Args:
            believed: What is known beforehand. Only the ratios of the costs matter. A cost of 0
                stands for no belief; the cost of a token or of a pass must be positive.
        """
        #: The costs as of the last refresh; None before the first.
        self.costs: Costs | None = None
        #: How many batches the costs were learned from.
        self.batches = 0
        #: Mean of `abs(took - expected) / expected` of late, each expected before the batch ran.
        #: None while there was no expectation.
        self.error: float | None = None
        #: Whether the costs were fitted, and the error is small.
        self.is_believable = False
        #: What the costs are thought to be beforehand. Only the ratios count.
        self._believed = believed
        #: The costs that are expected of the next batch; None before the first batch.
        self._expected: Costs | None = None
        #: Whether they were fitted. Until then, only the mean of the batches is known.
        self.is_fitted = False
        self._predictions = 0
        self._outliers = 0
        #: Sums of products of all rows (tokens, items, passes, ms) / ms with each other: all that
        #: least squares need.
        self._products = [[0.0] * 4 for _ in range(4)]
        self._new_rows: list[tuple[float, float, float, float]] = []
        self._count = 0
        self._tokens = self._items = 0.0
        #: What the batches before the first fit took, and what they were believed to take.
        self._took_ms = self._believed_ms = 0.0

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
        if tokens < 1 or items < 1 or passes < 1 or not MIN_MS <= ms <= MAX_MS:
            return False
        if self._expected is None:
            # The first batch also chooses kernels and asks for memory. It counts only until there
            # is another one.
            self._expected = self._scaled(ms / self._believed.expected_ms(tokens, items, passes))
            return False
        ratio = ms / self._expected.expected_ms(tokens, items, passes)
        if self._count or self.is_fitted:
            self._judge(ratio)
        if self.is_fitted and self._is_outlier(ratio):
            return False
        # A model that counts no tokens has one token per item: then the token's cost is enough.
        counted_items = items if items < tokens else 0
        self._new_rows.append((tokens / ms, counted_items / ms, passes / ms, 1.0))
        self._tokens += tokens
        self._items += items
        self._count += 1
        if not self.is_fitted:
            self._took_ms += ms
            self._believed_ms += self._believed.expected_ms(tokens, items, passes)
            self._expected = self._scaled(self._took_ms / self._believed_ms)
        return len(self._new_rows) == REFRESH_BATCHES and self._refresh()

    def expected_ms(self, tokens: int, items: int, passes: int = 1) -> float | None:
        """How long a batch will take; None before the first batch.

        Args:
            tokens: That are computed, padding included.
            items: That are computed.
            passes: Forward passes.
        """
        if self._expected is None:
            return None
        return self._expected.expected_ms(tokens, items, passes)

    def max_items(self, budget_ms: float, cap: int) -> int | None:
        """How many items of one token each a pass may have; None before the first batch.

        Args:
            budget_ms: What the pass may take.
            cap: Maximum of the answer.

        Returns:
            0 to `cap`; 0 if the pass of one item takes longer.
        """
        if self._expected is None:
            return None
        token_ms, item_ms, pass_ms = self._expected
        each_ms = token_ms + item_ms
        left_ms = budget_ms - pass_ms
        if left_ms >= each_ms * cap:
            return cap
        return int(left_ms / each_ms) if left_ms > 0 else 0

    @property
    def pass_tokens(self) -> float:
        """What a pass costs besides its tokens, in tokens.

        This is the ratio of the believed costs, which follow the fitted ones slowly, and only if
        batches differ enough. So noise in the fitted costs hardly moves it.
        """
        token_ms, _, pass_ms = self._believed
        return pass_ms / token_ms if token_ms > 0 else math.inf

    @property
    def useful_items(self) -> int | None:
        """Items of a pass beyond which throughput hardly grows, at the mean length of late."""
        if self.costs is None:
            return None
        each_ms = self.costs.token_ms * self._tokens / self._items + self.costs.item_ms
        if each_ms <= 0:
            return None
        return max(1, math.ceil(self.costs.pass_ms / each_ms * (1 - SPARED_SHARE) / SPARED_SHARE))

    def _scaled(self, factor: float) -> Costs:
        token_ms, item_ms, pass_ms = self._believed
        return Costs(token_ms * factor, item_ms * factor, pass_ms * factor)

    def _judge(self, ratio: float) -> None:
        """Counts the error of a prediction; a batch took `ratio` times as long as expected."""
        # How far an outlier is off says no more: it is rare, or its kind is soon expected.
        error = min(abs(ratio - 1), OUTLIER_FACTOR - 1)
        self._predictions += 1
        # The first ones all count alike.
        weight = max(ERROR_WEIGHT, 1 / self._predictions)
        self.error = error if self.error is None else self.error + weight * (error - self.error)
        limit = BAD_ERROR if self.is_believable else GOOD_ERROR
        self.is_believable = self.is_fitted and self.error <= limit

    def _is_outlier(self, ratio: float) -> bool:
        if 1 / OUTLIER_FACTOR <= ratio <= OUTLIER_FACTOR:
            if self._outliers:
                self._outliers -= 1
            return False
        self._outliers += 1
        if self._outliers == MAX_OUTLIERS:
            self._begin_anew(ratio)
        return True

    def _begin_anew(self, factor: float) -> None:
        """Forgets what was learned, which is of another time, but for the ratios of the costs.

        `costs` stay until there are new ones.

        Args:
            factor: How much longer the latest batch took. Until the next one, all are expected to.
        """
        assert self._expected is not None
        self._expected = Costs(*(factor * cost for cost in self._expected))
        self._products = [[0.0] * 4 for _ in range(4)]
        self._new_rows = []
        self._count = self._outliers = 0
        self._took_ms = self._believed_ms = 0.0
        self.is_fitted = self.is_believable = False

    def _refresh(self) -> bool:
        columns = list(zip(*self._new_rows, strict=True))
        self._new_rows = []
        for place, column in enumerate(columns):
            for other in range(place, len(columns)):
                product = KEPT_SHARE * self._products[place][other]
                product += sum(map(mul, column, columns[other]))
                self._products[place][other] = self._products[other][place] = product
        believed = self._believed_at_this_level()
        costs = non_negative_fit(self._with_belief(believed))
        if costs is None:
            return False
        self.costs = self._expected = Costs(*costs)
        self.is_fitted = True
        if distinct_share(self._products, 2) >= MIN_DISTINCT_SHARE:
            both = zip(believed, costs, strict=True)
            believed = [KEPT_SHARE * old + (1 - KEPT_SHARE) * new for old, new in both]
        self._believed = Costs(*believed)
        self.batches = self._count
        self._tokens *= KEPT_SHARE
        self._items *= KEPT_SHARE
        return True

    def _believed_at_this_level(self) -> list[float]:
        """The believed costs, multiplied by one factor so that they fit the batches best."""
        towards = [sum(map(mul, self._believed, row)) for row in self._products]
        squares = sum(map(mul, self._believed, towards))
        return [cost * towards[-1] / squares for cost in self._believed]

    def _with_belief(self, believed: list[float]) -> list[list[float]]:
        """The products, with a row for each believed cost: alone, that cost explains a batch."""
        products = [list(row) for row in self._products]
        least = NEGLIGIBLE_SHARE * max(believed)
        for place, cost in enumerate(believed):
            if cost > least:
                products[place][place] += BELIEF_WEIGHT / cost**2
                products[place][-1] += BELIEF_WEIGHT / cost
                products[-1][place] += BELIEF_WEIGHT / cost
                products[-1][-1] += BELIEF_WEIGHT
        return products


#: Device time of an item of a task that never ran, in seconds, and the maximum that lanes are
#: charged for one before its costs are fitted. It is corrected when its batch is back. Too little
#: lets a lane have a few batches in advance. Too much moves the virtual time ahead of all lanes for
#: long, and whoever wakes meanwhile starves.
UNKNOWN_ITEM_S = 0.001

#: What is believed of a task: a batch costs as much as one item besides its items. More would let
#: one small batch promise that large ones are cheap.
BELIEVED = Costs(token_ms=1.0, item_ms=0.0, pass_ms=1.0)


class TaskCosts:
    """A cost model for each task, of items only: the main process knows of no tokens.

    Its devices count as one, at their mean speed.
    """

    def __init__(self) -> None:
        self._models: defaultdict[str, CostModel] = defaultdict(partial(CostModel, BELIEVED))

    def ran(self, task: str, items: int, run_s: float) -> None:
        """Adds a batch.

        Args:
            task: Its task.
            items: Number of items.
            run_s: How long it had its device, in seconds; nothing is learned from 0.
        """
        self._models[task].ran(items, items, 1, run_s * 1e3)

    def expected_s(self, task: str, items: int) -> float:
        """How long a batch will have its device, in seconds."""
        expected_ms = self._models[task].expected_ms(items, items)
        return UNKNOWN_ITEM_S * items if expected_ms is None else expected_ms / 1e3

    def knows(self, task: str) -> bool:
        """Whether a batch of a task is back."""
        return self._models[task].expected_ms(1, 1) is not None

    def are_fitted(self, task: str) -> bool:
        """Whether costs of a task were fitted: before, one slow batch may stand for all."""
        return self._models[task].is_fitted

    def is_believable(self, task: str) -> bool:
        """Whether what is expected of a task has come true of late."""
        return self._models[task].is_believable

    def error(self, task: str) -> float:
        """Mean relative error of what was expected of late; 0 for a task that never ran."""
        return self._models[task].error or 0.0

    def max_items(self, task: str, budget_s: float, cap: int) -> int | None:
        """How many items a batch may have; None for a task that never ran.

        Args:
            task: Its task.
            budget_s: How long the batch may have its device, in seconds.
            cap: Maximum of the answer.

        Returns:
            0 to `cap`; 0 if a batch of one item takes longer.
        """
        return self._models[task].max_items(budget_s * 1e3, cap)

    def figures(self) -> dict[str, dict[str, Any]]:
        """What `batchery stats` shows of each task whose costs were fitted."""
        return {
            task: {
                "item_us": round(model.costs.token_ms * 1e3, 3),
                "pass_ms": round(model.costs.pass_ms, 3),
                "error": None if model.error is None else round(model.error, 3),
                "batches": model.batches,
            }
            for task, model in list(self._models.items())
            if model.costs is not None
        }
