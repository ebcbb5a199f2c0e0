"""What passes cost, learned from the batches that ran."""

import math
import random
import sys
from collections.abc import Iterator
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import MAX_OUTLIERS, REFRESH_BATCHES, CostModel, Costs

#: As of a CPU where nothing was measured: a pass costs as much as 32 tokens.
GUESS = Costs(1.0, 0.0, 32.0)

#: Tokens of a pass.
BUDGET = 512

Shape = tuple[int, int, int]

#: Each example is hundreds of batches.
FEW = settings(max_examples=20, deadline=None)


def shapes(seed: int) -> Iterator[Shape]:
    """Tokens, items and passes of batches of mixed sizes, cut within the budget."""
    draw = random.Random(seed)
    while True:
        items = draw.randint(1, 64)
        tokens = round(items * draw.uniform(4, 80))
        yield tokens, items, -(-tokens // BUDGET)


def feed(
    model: CostModel, costs: Costs, batches: int, *, seed: int = 1, noise: float = 0.0
) -> None:
    draw = random.Random(seed)
    for _, shape in zip(range(batches), shapes(seed), strict=False):
        model.ran(*shape, costs.expected_ms(*shape) * (1 + draw.uniform(0, noise)))


def error(model: CostModel, costs: Costs) -> float:
    """The share by which it is wrong about a batch, in the mean."""
    found = model.costs
    assert found is not None
    return fmean(
        abs(found.expected_ms(*shape) / costs.expected_ms(*shape) - 1)
        for _, shape in zip(range(100), shapes(99), strict=False)
    )


costs_of = st.builds(
    Costs,
    token_ms=st.floats(1e-3, 1),
    item_ms=st.floats(0, 5),
    pass_ms=st.floats(0.1, 50),
)


@FEW
@given(costs_of, st.integers(0, 1000))
def test_costs_are_found_whatever_was_believed(costs: Costs, seed: int) -> None:
    model = CostModel(GUESS)
    feed(model, costs, 640, seed=seed)
    assert error(model, costs) < 0.05


@FEW
@given(st.integers(0, 1000))
def test_costs_are_found_in_noise(seed: int) -> None:
    costs = Costs(0.05, 0.5, 4.0)
    model = CostModel(GUESS)
    feed(model, costs, 512, seed=seed, noise=0.2)
    # Noise only makes slower: by a tenth in the mean.
    assert error(model, Costs(*(1.1 * cost for cost in costs))) < 0.15


@FEW
@given(st.floats(0.1, 10), st.integers(0, 1000))
def test_changed_costs_are_followed(factor: float, seed: int) -> None:
    before = Costs(0.05, 0.1, 2.0)
    after = Costs(*(factor * cost for cost in before))
    model = CostModel(before)
    feed(model, before, 300, seed=seed)
    assert error(model, before) < 0.05
    feed(model, after, 1000, seed=seed + 1)
    assert error(model, after) < 0.1


def test_changed_ratio_of_costs_is_followed() -> None:
    model = CostModel(Costs(0.05, 0.0, 1.0))
    feed(model, Costs(0.05, 0.0, 1.0), 300)
    feed(model, Costs(0.05, 0.0, 3.0), 2000)
    assert model.costs is not None
    assert model.costs.pass_ms == pytest.approx(3.0, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    ),
    costs_of,
)
def test_costs_stay_finite_whatever_is_measured(
    batches: list[tuple[int, int, int, float]], believed: Costs
) -> None:
    model = CostModel(believed)
    for batch in batches * 3:
        new = model.ran(*batch)
        assert model.costs is not None or not new
        if model.costs is not None:
            assert all(0 <= cost < math.inf for cost in model.costs)
            assert 0 <= model.costs.expected_ms(512, 16, 2) < math.inf
            assert model.useful_items is None or model.useful_items >= 1


def test_equal_batches_change_the_level_and_not_the_ratio() -> None:
    model = CostModel(Costs(0.05, 0.0, 1.6))
    for _ in range(500):
        model.ran(512, 16, 1, 2 * (0.05 * 512 + 1.6))
    assert model.costs is not None
    assert model.costs.token_ms == pytest.approx(0.1, rel=0.01)
    assert model.costs.pass_ms == pytest.approx(3.2, rel=0.01)


def test_item_cost_is_zero_where_each_item_is_one_token() -> None:
    model = CostModel(GUESS)
    for number in range(200):
        items = 1 + number % 64
        model.ran(items, items, 1, 0.5 * items + 3.0)
    assert model.costs is not None
    assert model.costs.item_ms == 0
    assert model.costs.token_ms == pytest.approx(0.5, rel=0.02)


def test_first_batch_is_ignored() -> None:
    alike = CostModel(GUESS)
    for number in range(REFRESH_BATCHES + 1):
        assert alike.costs is None
        new = alike.ran(100, 10, 1, 1e9 if number == 0 else 5.0)
        assert new == (number == REFRESH_BATCHES)
    assert alike.costs is not None
    assert alike.costs.expected_ms(100, 10) == pytest.approx(5.0, rel=0.01)
    assert alike.batches == REFRESH_BATCHES


def test_rare_outliers_are_ignored() -> None:
    costs = Costs(0.05, 0.0, 2.0)
    model = CostModel(costs)
    feed(model, costs, 100)
    for seed in range(100):
        model.ran(200, 10, 1, 50 * costs.expected_ms(200, 10))
        feed(model, costs, 5, seed=seed)
    assert error(model, costs) < 1e-3


def test_outliers_that_stay_replace_what_was_learned() -> None:
    slow = Costs(5.0, 0.0, 200.0)
    model = CostModel(Costs(0.05, 0.0, 2.0))
    feed(model, Costs(0.05, 0.0, 2.0), 1000)
    feed(model, slow, MAX_OUTLIERS + REFRESH_BATCHES)
    assert error(model, slow) < 1e-3


def test_useful_items_spend_one_twentieth_on_the_pass() -> None:
    costs = Costs(0.1, 0.5, 10.0)
    model = CostModel(costs)
    assert model.useful_items is None
    for items in list(range(1, 65)) * 3:
        model.ran(20 * items, items, 1, costs.expected_ms(20 * items, items))
    useful = model.useful_items
    assert useful is not None
    assert 10.0 / costs.expected_ms(20 * useful, useful) == pytest.approx(0.05, rel=0.02)


def test_without_numpy_nothing_is_learned_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    model = CostModel(GUESS)
    feed(model, Costs(0.05, 0.5, 4.0), 3 * REFRESH_BATCHES)
    assert model.costs is None
    assert model.useful_items is None
