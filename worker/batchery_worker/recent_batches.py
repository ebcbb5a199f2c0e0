"""What a forward pass costs, by the batches that ran lately: pure.

A batch of T tokens and B items in P passes takes `token_ms * T + item_ms * B + pass_ms * P`. Each
batch is one row of a least-squares fit that forgets, so the costs follow the machine: other work on
it, another clock rate, other texts than those that were measured at the start.
"""

import math

from batchery_worker.calibration import SPARED, Costs
from batchery_worker.least_squares import Sums

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
