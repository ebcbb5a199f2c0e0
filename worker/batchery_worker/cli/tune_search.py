"""Which `max_batch_size` and `max_batch_tokens` suit a model: measured over texts, case by case."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batchery.execution.batch import compute
from batchery.model import Model
from batchery_worker.batching.planner import PASS_TOKENS, plan
from batchery_worker.memory import Memory

#: Cases to begin with. A batch of one shows what batching is worth.
SIZES = (1, 16, 64, 256)
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

#: How often there is time for each case: the median of fewer says little.
ROUNDS = 3

#: Items of the pass that warms up.
WARM_UP = 16

#: Share of the best rate that is given away for smaller batches, which take less memory, and in
#: which each job waits for fewer others.
SPARED = 0.05

#: Below this share of the best rate, still larger budgets are not tried: padding only grows.
HOPELESS = 0.9

#: Share of the least budget that failed, within which the largest that fits is looked for.
CLOSE = 1 / 16

#: Share of what fits that is recommended at most: other inputs take more memory, and fragments do.
MEMORY_SHARE = 0.8


@dataclass(slots=True)
class Case:
    """One pair of limits, and what was measured with it."""

    max_batch_size: int
    #: 0 for batches of one, which it cannot divide.
    max_batch_tokens: int
    rates: list[float] = field(default_factory=list)
    #: Of all rounds: tokens of the items, and with padding.
    tokens: int = 0
    computed_tokens: int = 0
    #: Largest forward pass, in tokens; smaller than the budget where the batches are too small.
    largest_pass: int = 0
    out_of_memory: bool = False

    @property
    def items_per_s(self) -> float:
        """Median of all rounds; 0 where memory ran out."""
        return 0.0 if self.out_of_memory or not self.rates else statistics.median(self.rates)

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that carried nothing."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        rates = self.rates if not self.out_of_memory else []
        return {
            "max_batch_size": self.max_batch_size,
            "max_batch_tokens": self.max_batch_tokens,
            "items_per_s": round(self.items_per_s, 1),
            "spread": [round(min(rates), 1), round(max(rates), 1)] if rates else None,
            "padding_waste": round(self.padding_waste, 3),
            "largest_pass_tokens": self.largest_pass,
            "out_of_memory": self.out_of_memory,
        }


class _Witness:
    """Sees how large the passes were, and whether one failed."""

    def __init__(self) -> None:
        self.largest = 0
        self.failed_tokens = 0

    def passed(self, tokens: int) -> None:
        self.largest = max(self.largest, tokens)

    def failed(self, tokens: int) -> None:
        self.failed_tokens = max(self.failed_tokens, tokens)


class Search:
    """Measures one model over the same items with different limits."""

    def __init__(
        self,
        model: Model,
        items: Sequence[Any],
        device: str,
        memory: Memory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measures nothing yet.

        Args:
            model: Loaded.
            items: Prepared, and all of them fit to run; at least one.
            device: As torch spells it.
            memory: Of that device.
            clock: Seconds, on any scale.
        """
        self._model = model
        # A trial may end after some of them, which shall be like all of them.
        self._items = random.Random(1).sample(list(items), len(items))
        self._lengths = [max(1, model.tokens(each)) for each in self._items]
        #: Pairs for which there was no time.
        self.left_out = 0
        self._pass_tokens = PASS_TOKENS[device.partition(":")[0]]
        self._memory = memory
        self._clock = clock

    def run(
        self,
        sizes: Sequence[int],
        tokens: Sequence[int],
        limit_s: float,
        on_case: Callable[[Case], None] = lambda _: None,
    ) -> list[Case]:
        """Measures all cases in turn, and again, until the time is up.

        No trial takes more than its part of the time, or one batch if that takes longer, however
        slow the model or busy the machine.

        Args:
            sizes: Of `max_batch_size`.
            tokens: Of `max_batch_tokens`.
            limit_s: How long it takes, but for the batch that runs; each size is measured once at
                least.
            on_case: Called with each case after each of its trials.

        Returns:
            The cases that were measured, by size, then by tokens. Of each size, budgets beyond one
            that ran out of memory, or beyond two that were clearly slower, are left out.
        """
        longest = max(self._lengths)
        cases = [
            Case(size, budget)
            for size in sizes
            for budget in (_useful(tokens, size * longest) if size > 1 else [0])
        ]
        end_s = self._clock() + limit_s
        trial_s = limit_s / (ROUNDS * len(cases))
        compute(self._model, self._items[:WARM_UP], {}, _in_one_pass)
        first = _one_of_each_size(cases)
        rest = [case for case in cases if case not in first]
        # To and fro over all budgets: what there is no time for has neighbours on both sides.
        for case in [*first, *rest[::2], *rest[1::2]]:
            if case not in first and self._clock() >= end_s:
                self.left_out += 1
            elif not _is_hopeless(case, cases):
                self._measure(case, trial_s)
                on_case(case)
        cases = [case for case in cases if case.rates]
        while self._clock() < end_s and any(not case.out_of_memory for case in cases):
            for case in cases:
                if not case.out_of_memory and self._clock() < end_s:
                    self._measure(case, trial_s)
                    on_case(case)
        return cases

    def largest_budget(self, fits: int, fails: int, limit_s: float = float("inf")) -> int:
        """Looks for the largest pass that fits, by halves; nothing that does not fit ends it.

        Args:
            fits: Tokens of a pass that fitted; 0 if none did.
            fails: Tokens of one that did not.
            limit_s: How long it takes, but for the pass that runs; then it answers with what is
                known to fit.
        """
        end_s = self._clock() + limit_s
        longest = max(self._items, key=self._model.tokens)
        length = max(1, self._model.tokens(longest))
        while fails - fits > max(length, int(fails * CLOSE)) and self._clock() < end_s:
            count = max(1, (fits + fails) // 2 // length)
            witness = _Witness()
            compute(self._model, [longest] * count, {}, _in_one_pass, memory=witness)
            self._memory.release()
            if witness.failed_tokens:
                fails = min(fails - 1, count * length)
            else:
                fits = max(fits + 1, count * length)
        return fits

    def _measure(self, case: Case, limit_s: float) -> None:
        """One trial: all items, or as many as there is time for."""
        witness = _Witness()
        cut = partial(self._cut, case)
        tokens = start = 0
        self._memory.wait()
        began_s = self._clock()
        while start == 0 or (start < len(self._items) and self._clock() < began_s + limit_s):
            part = self._items[start : start + case.max_batch_size]
            _, needed, computed = compute(self._model, part, {}, cut, memory=witness)
            tokens += needed
            case.computed_tokens += computed
            start += case.max_batch_size
        self._memory.wait()
        # By tokens, as the items of one trial may be longer than those of another.
        mean = statistics.fmean(self._lengths)
        case.rates.append(tokens / mean / max(self._clock() - began_s, 1e-9))
        case.tokens += tokens
        case.largest_pass = max(case.largest_pass, witness.largest)
        if witness.failed_tokens:
            case.out_of_memory = True
            case.largest_pass = witness.failed_tokens
            self._memory.release()

    def _cut(self, case: Case, lengths: Sequence[int]) -> list[list[int]]:
        return plan(
            lengths,
            case.max_batch_tokens or max(lengths),
            case.max_batch_size,
            pads=self._model.pads,
            pass_tokens=self._pass_tokens,
            lanes=self._model.lanes,
        )


def _in_one_pass(lengths: Sequence[int]) -> list[list[int]]:
    return [list(range(len(lengths)))]


def _one_of_each_size(cases: Sequence[Case]) -> list[Case]:
    """The second smallest budget of each size, if there are two."""
    first: dict[int, list[Case]] = {}
    for case in cases:
        first.setdefault(case.max_batch_size, []).append(case)
    return [same[min(1, len(same) - 1)] for same in first.values()]


def _is_hopeless(case: Case, cases: Sequence[Case]) -> bool:
    """Whether two smaller budgets in a row were clearly worse than the best of that size."""
    same = [each for each in cases if each.max_batch_size == case.max_batch_size and each.rates]
    smaller = [each for each in same if each.max_batch_tokens < case.max_batch_tokens]
    if any(each.out_of_memory for each in smaller):
        return True
    best = max((each.items_per_s for each in same), default=0.0)
    return len(smaller) > 2 and all(each.items_per_s < HOPELESS * best for each in smaller[-2:])


def _useful(tokens: Sequence[int], largest: int) -> list[int]:
    """The budgets that make a difference: those below the largest batch, and one above."""
    below = [each for each in tokens if each < largest]
    return below + [each for each in tokens if each >= largest][:1]


def recommend(cases: Sequence[Case], fits: int | None = None) -> Case:
    """The smallest limits of which the rate is as good as the best.

    Args:
        cases: Measured.
        fits: Tokens of the largest pass that fits into memory; None if all did.
    """
    best = max(case.items_per_s for case in cases)
    room = float("inf") if fits is None else MEMORY_SHARE * fits
    good = [
        case
        for case in cases
        if not case.out_of_memory
        and case.items_per_s >= (1 - SPARED) * best
        and case.max_batch_tokens <= room
    ]
    # Where nothing good fits with a margin, what ran is still better than a guess.
    ran = [case for case in cases if not case.out_of_memory]
    return min(good or ran or cases, key=lambda case: (case.max_batch_size, case.max_batch_tokens))
