"""What forward passes cost, learned from the batches that ran: pure."""

import math
from itertools import combinations
from typing import Any, NamedTuple

#: How often the costs are fitted anew, in batches; before the first time there are none.
REFRESH_BATCHES = 16

#: Weight that is left of a batch at the next refresh: half of it after 176 batches.
KEPT_SHARE = 15 / 16

#: Weight of what is believed, in batches. Batches that are all alike cannot tell tokens from
#: passes: then the belief decides. Otherwise it is outvoted, and drifts to what is found.
BELIEF_WEIGHT = 0.05

#: A batch that takes so many times as long as expected, or as little, says nothing about its shape.
OUTLIER_FACTOR = 3.0

#: After so many more outliers than other batches the costs have changed, and are learned anew.
MAX_OUTLIERS = 8

#: Range of a credible time of a batch: a nanosecond to eleven days. Beyond it the clock was set.
MIN_MS, MAX_MS = 1e-6, 1e9

#: Share of the error that one more cost must explain: between equals, fewer costs win.
MIN_GAIN = 0.01

#: Columns, and believed costs, that are smaller than this share of the others count as 0.
NEGLIGIBLE_SHARE = 1e-9

#: Share of the highest throughput that a batch of `useful_items` gives away: a pass of 19 times
#: what it costs besides its tokens reaches 95 %.
SPARED_SHARE = 0.05


class Costs(NamedTuple):
    """What forward passes cost: for each token, for each item, and for each pass besides."""

    token_ms: float
    item_ms: float
    pass_ms: float

    def expected_ms(self, tokens: int, items: int, passes: int = 1) -> float:
        """How long a batch takes; never negative."""
        return self.token_ms * tokens + self.item_ms * items + self.pass_ms * passes


class CostModel:
    """The costs of one model on one device.

    A batch takes `token_ms * tokens + item_ms * items + pass_ms * passes`. The three costs are the
    non-negative ones with the smallest squares of relative errors, over all batches; older batches
    count less and less.
    """

    def __init__(self, believed: Costs) -> None:
        """Has seen no batch.

        Args:
            believed: What is known beforehand. Only the ratios of the costs matter. A cost of 0
                stands for no belief; at least one cost must be positive.
        """
        #: The costs as of the last refresh; None before the first.
        self.costs: Costs | None = None
        #: How many batches the costs were learned from.
        self.batches = 0
        self._believed = believed
        #: The costs by which a batch is an outlier; None while everything is new.
        self._expected: Costs | None = None
        self._outliers = 0
        self._is_first = True
        #: Products of all rows (tokens, items, passes, ms) / ms: all that least squares need.
        self._products: Any = 0.0
        self._new_rows: list[tuple[float, float, float, float]] = []
        self._count = 0
        self._tokens = self._items = 0.0

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
        if min(tokens, items, passes) < 1 or not MIN_MS <= ms <= MAX_MS:
            return False
        if self._is_first:
            # The first batch also chooses kernels and asks for memory.
            self._is_first = False
            return False
        if self._is_outlier(tokens, items, passes, ms):
            return False
        # A model that counts no tokens has one token per item: then the token's cost is enough.
        counted_items = items if items < tokens else 0
        self._new_rows.append((tokens / ms, counted_items / ms, passes / ms, 1.0))
        self._tokens += tokens
        self._items += items
        self._count += 1
        return len(self._new_rows) == REFRESH_BATCHES and self._refresh()

    @property
    def useful_items(self) -> int | None:
        """Items of a pass beyond which throughput hardly grows, at the mean length of late."""
        if self.costs is None:
            return None
        each_ms = self.costs.token_ms * self._tokens / self._items + self.costs.item_ms
        if each_ms <= 0:
            return None
        return max(1, math.ceil(self.costs.pass_ms / each_ms * (1 - SPARED_SHARE) / SPARED_SHARE))

    def _is_outlier(self, tokens: int, items: int, passes: int, ms: float) -> bool:
        if self._expected is None:
            return False
        expected_ms = self._expected.expected_ms(tokens, items, passes)
        if expected_ms / OUTLIER_FACTOR <= ms <= expected_ms * OUTLIER_FACTOR:
            self._outliers = max(0, self._outliers - 1)
            return False
        self._outliers += 1
        if self._outliers == MAX_OUTLIERS:
            # What was learned is of another time. The costs stay until there are new ones.
            self._products = 0.0
            self._new_rows = []
            self._count = self._outliers = 0
            self._expected = None
        return True

    def _refresh(self) -> bool:
        new_rows, self._new_rows = self._new_rows, []
        try:
            # Imported late: it takes a tenth of a second, and a device without models has no use
            # for it.
            import numpy as np
        except ImportError:
            # A model of one's own may need neither torch nor numpy. Then nothing is learned.
            return False
        rows = np.array(new_rows)
        self._products = KEPT_SHARE * self._products + rows.T @ rows
        believed = np.array(self._believed, dtype=float)
        products, totals = self._products[:3, :3], self._products[:3, 3]
        believed *= believed @ totals / (believed @ products @ believed)
        # A row for each believed cost: alone, that cost explains a batch.
        trusted = believed > NEGLIGIBLE_SHARE * believed.max()
        belief = np.diag(np.divide(1.0, believed, out=np.zeros(3), where=trusted))
        belief = np.column_stack([belief, trusted])
        costs = _non_negative_fit(self._products + BELIEF_WEIGHT * belief.T @ belief)
        if costs is None:
            return False
        self.costs = self._expected = Costs(*costs.tolist())
        self._believed = Costs(*(KEPT_SHARE * believed + (1 - KEPT_SHARE) * costs).tolist())
        self.batches = self._count
        self._tokens *= KEPT_SHARE
        self._items *= KEPT_SHARE
        return True


def _non_negative_fit(products: Any) -> Any:
    """The non-negative costs with the smallest error; None if there are none.

    Args:
        products: Of all rows with each other; the last column is what the others must add up to.
    """
    import numpy as np

    count = len(products) - 1
    scales = np.sqrt(np.diag(products))
    scales[scales == 0] = 1.0
    scaled = products / np.outer(scales, scales)
    best, least_error = None, math.inf
    # A negative cost is noise that another cost should have had. So each set of costs is tried.
    for size in range(1, count + 1):
        for kept in map(list, combinations(range(count), size)):
            signed = np.zeros(count + 1)
            signed[kept] = np.linalg.lstsq(
                scaled[np.ix_(kept, kept)], scaled[kept, count], rcond=NEGLIGIBLE_SHARE
            )[0]
            signed[count] = -1.0
            error = signed @ scaled @ signed
            if min(signed[kept]) >= 0 and error < (1 - MIN_GAIN) * least_error:
                best, least_error = signed[:count] / scales[:count] * scales[count], error
    return best if best is not None and np.isfinite(best).all() else None
