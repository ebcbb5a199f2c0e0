"""Plans of a device whose passes cost eight times what was thought, or an eighth of it."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery import Model
from batchery_worker.batching.cost_model import Costs
from batchery_worker.batching.planner import MAX_PASS_TOKENS_FACTOR, PASS_TOKENS, plan
from batchery_worker.memory import Memory
from batchery_worker.serving import served_model
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

#: Of passes; wide enough that more than one plan is worth a thought.
BUDGET = served_model.DEFAULT_MAX_BATCH_TOKENS["cpu"]

#: What is thought of a pass on a CPU.
DEFAULT = PASS_TOKENS["cpu"]

Window = list[int]


class Simulated(Model):
    """Items are their own lengths. A pass takes what its costs say, and some noise."""

    def __init__(self, pass_tokens: float, item_tokens: float = 0.0, noise: float = 0.0) -> None:
        self.now_s = 0.0
        self.passes = 0
        self._costs = Costs(0.01, 0.01 * item_tokens, 0.01 * pass_tokens)
        self._noise = noise
        self._draw = random.Random(1)

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        self.passes += 1
        slower = 1 + self._draw.uniform(0, self._noise)
        expected_ms = self._costs.expected_ms(max(batch) * len(batch), len(batch))
        self.now_s += expected_ms * slower / 1e3
        return list(batch)


def windows(seed: int, count: int) -> list[Window]:
    """Batches of mixed sizes, texts of mixed lengths."""
    draw = random.Random(seed)
    return [
        [min(512, max(3, round(draw.lognormvariate(3.3, 0.8)))) for _ in range(draw.randint(1, 48))]
        for _ in range(count)
    ]


def serve(model: Model, clock: Simulated) -> LoadedModel:
    return LoadedModel("simulated", model, "cpu", Memory(), clock=lambda: clock.now_s)


def run(served: LoadedModel, batches: Sequence[Window]) -> list[int]:
    """Returns what a pass counted in the plan of each batch, in tokens."""
    counted = []
    for items in batches:
        work = Work(1, "simulated", {}, [], 256, None)
        assert served.compute(items, work, nullcontext)[0] == items
        counted.append(served._pass_tokens)
    return counted


def cost_tokens(batches: Sequence[Window], planned_with: int, pass_tokens: float) -> float:
    """What all passes cost in tokens if a pass truly costs `pass_tokens`."""
    return sum(
        max(items[place] for place in cut) * len(cut) + pass_tokens
        for items in batches
        for cut in plan(items, BUDGET, 256, pass_tokens=planned_with)
    )


@pytest.mark.parametrize("factor", [1 / MAX_PASS_TOKENS_FACTOR, 1, MAX_PASS_TOKENS_FACTOR])
@pytest.mark.parametrize("item_tokens", [0.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_plans_become_the_cheapest_and_stay_it(
    factor: float, item_tokens: float, noise: float
) -> None:
    pass_tokens = DEFAULT * factor
    model = Simulated(pass_tokens, item_tokens, noise)
    counted = run(serve(model, model), windows(1, 1200))
    late = counted[-400:]
    assert max(late) <= 1.25 * min(late) + 1
    fresh = windows(2, 60)
    cheapest = cost_tokens(fresh, round(pass_tokens), pass_tokens)
    for each in (min(late), max(late)):
        assert cost_tokens(fresh, each, pass_tokens) <= 1.01 * cheapest
    if factor != 1:
        assert cost_tokens(fresh, DEFAULT, pass_tokens) > 1.03 * cheapest


@settings(max_examples=10, deadline=None)
@given(st.floats(0, 10_000), st.floats(0, 100), st.floats(0, 1), st.integers(0, 1000))
def test_plans_count_no_absurd_cost_whatever_a_pass_takes(
    pass_tokens: float, item_tokens: float, noise: float, seed: int
) -> None:
    model = Simulated(pass_tokens, item_tokens, noise)
    counted = run(serve(model, model), windows(seed, 150))
    assert min(counted) >= DEFAULT / MAX_PASS_TOKENS_FACTOR
    assert max(counted) <= DEFAULT * MAX_PASS_TOKENS_FACTOR
    # Nothing is believed before there are costs.
    assert set(counted[:16]) == {DEFAULT}


def test_passes_side_by_side_keep_the_default() -> None:
    model = Simulated(DEFAULT * MAX_PASS_TOKENS_FACTOR)
    model.pass_streams = 2  # type: ignore[attr-defined]
    assert set(run(serve(model, model), windows(1, 200))) == {DEFAULT}
