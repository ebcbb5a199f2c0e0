"""What passes cost, learned from the batches that ran."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import (
    BAD_ERROR,
    GOOD_ERROR,
    MAX_OUTLIERS,
    MIN_GAIN,
    REFRESH_BATCHES,
    UNKNOWN_ITEM_S,
    CostModel,
    Costs,
    TaskCosts,
    distinct_share,
    non_negative_fit,
)

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
@given(st.floats(0.1, 10), st.integers(0, 1000))
def test_changed_costs_are_followed(factor: float, seed: int) -> None:
    before = Costs(0.05, 0.1, 2.0)
    after = Costs(*(factor * cost for cost in before))
    model = CostModel(before)
    feed(model, before, 300, seed=seed)
    assert error(model, before) < 0.05
    feed(model, after, 1000, seed=seed + 1)
    assert error(model, after) < 0.1


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


def test_a_batch_is_expected_after_the_first_one() -> None:
    model = CostModel(Costs(1.0, 0.0, 8.0))
    assert model.expected_ms(10, 10) is None
    assert model.max_items(100.0, 64) is None
    # It may have taken long for other reasons, so it counts until there is another.
    model.ran(10, 10, 1, 18_000.0)
    assert model.expected_ms(2, 2) == pytest.approx(10_000.0)
    model.ran(10, 10, 1, 18.0)
    assert model.expected_ms(2, 2) == pytest.approx(10.0)
    # From now on, the mean.
    model.ran(4, 4, 1, 18.0)
    assert model.expected_ms(2, 2) == pytest.approx(36 / 30 * 10)
    assert model.error == pytest.approx(18 / 12 - 1)
    assert model.costs is None
    assert not model.is_believable


@FEW
@given(costs_of, st.integers(0, 1000), st.floats(0, 0.2))
def test_costs_are_found_and_believed_whatever_was_thought_before(
    costs: Costs, seed: int, noise: float
) -> None:
    model = CostModel(GUESS)
    assert model.error is None
    feed(model, costs, 640, seed=seed, noise=noise)
    assert model.error is not None
    # In the mean: what was thought before still moves the smallest batches, whose costs the others
    # say least about. Noise only makes slower.
    assert model.error < 0.05 + noise / 2
    assert model.is_believable
    assert error(model, Costs(*((1 + noise / 2) * cost for cost in costs))) < 0.05 + noise / 2


def test_error_is_of_predictions_before_they_were_learned() -> None:
    model = CostModel(GUESS)
    draw = random.Random(1)
    wrong = []
    for _ in range(400):
        ms = 10 * draw.uniform(1, 1.5)
        expected_ms = model.expected_ms(100, 10)
        if expected_ms is not None:
            wrong.append(abs(ms - expected_ms) / expected_ms)
        model.ran(100, 10, 1, ms)
    assert model.error == pytest.approx(fmean(wrong[-64:]), abs=0.03)


def test_times_that_follow_no_rule_are_not_believed() -> None:
    model = CostModel(GUESS)
    draw = random.Random(1)
    for _ in range(400):
        model.ran(100, 10, 1, 10 ** draw.uniform(0, 2))
        assert not model.is_believable
    assert model.error is not None
    assert model.error > BAD_ERROR


def test_one_slow_batch_ends_no_trust_and_many_do() -> None:
    costs = Costs(0.05, 0.1, 2.0)
    model = CostModel(costs)
    feed(model, costs, 100)
    model.ran(200, 10, 1, 50 * costs.expected_ms(200, 10))
    assert model.is_believable
    for _ in range(MAX_OUTLIERS):
        model.ran(200, 10, 1, 50 * costs.expected_ms(200, 10))
    assert not model.is_believable
    # What is expected follows at once, and is believed again when it has come true for a while.
    assert model.expected_ms(200, 10) == pytest.approx(50 * costs.expected_ms(200, 10))
    feed(model, Costs(2.5, 5.0, 100.0), 50)
    assert model.is_believable


def test_trust_does_not_change_between_two_limits() -> None:
    fresh, known = CostModel(GUESS), CostModel(GUESS)
    feed(known, GUESS, 100)
    for number in range(400):
        for model in (fresh, known):
            model.ran(100, 10, 1, GUESS.expected_ms(100, 10) * (1 + 0.27 * (-1) ** number))
    for model, trusted in ((fresh, False), (known, True)):
        assert model.error is not None
        assert GOOD_ERROR < model.error < BAD_ERROR
        assert model.is_believable == trusted


@FEW
@given(
    costs_of,
    st.floats(0, 1000),
    st.integers(1, 512),
    st.integers(1, 3 * REFRESH_BATCHES),
)
def test_max_items_are_the_most_that_a_budget_allows(
    costs: Costs, budget_ms: float, cap: int, batches: int
) -> None:
    model = CostModel(GUESS)
    feed(model, costs, batches)
    most = model.max_items(budget_ms, cap)
    assert most is not None
    assert 0 <= most <= cap
    if most:
        assert (model.expected_ms(most, most) or 0.0) <= budget_ms * 1.001
    if most < cap:
        assert (model.expected_ms(most + 1, most + 1) or 0.0) > budget_ms * 0.999


def test_a_batch_that_took_no_time_teaches_nothing() -> None:
    model = CostModel(GUESS)
    assert not model.ran(10, 10, 1, 0.0)
    assert model.expected_ms(10, 10) is None


def test_what_a_pass_costs_in_tokens_is_believed_first_and_then_found() -> None:
    model = CostModel(GUESS)
    assert model.pass_tokens == 32
    # Alike batches tell nothing about it.
    for _ in range(200):
        model.ran(512, 16, 1, 20.0)
    assert model.pass_tokens == pytest.approx(32, rel=0.01)
    feed(model, Costs(0.05, 0.5, 0.05 * 256), 2000)
    assert model.pass_tokens == pytest.approx(256, rel=0.05)
    assert CostModel(Costs(0.0, 1.0, 1.0)).pass_tokens == math.inf


def test_full_batches_on_a_busy_machine_change_no_belief() -> None:
    model = CostModel(GUESS)
    draw = random.Random(1)
    level = 1.0
    for _ in range(1000):
        level = min(2.0, max(0.5, level * (1 + draw.gauss(0, 0.02))))
        tokens = 2000 + draw.randint(-100, 100)
        model.ran(tokens, 64, 4, level * GUESS.expected_ms(tokens, 64, 4))
    assert model.costs is not None
    assert model.pass_tokens == pytest.approx(32)


# Least squares without numpy: as good as any choice of columns that numpy tries


#: Columns of all sizes: tokens per millisecond are thousands, passes per millisecond fractions.
value = st.one_of(st.just(0.0), st.floats(1e-3, 1e4))
rows = st.lists(st.tuples(value, value, value), min_size=1, max_size=12)


def products_of(columns: Sequence[tuple[float, ...]]) -> list[list[float]]:
    matrix = np.array([(*row, 1.0) for row in columns])
    found: list[list[float]] = (matrix.T @ matrix).tolist()
    return found


def loss(columns: Sequence[tuple[float, ...]], costs: list[float]) -> float:
    return float(np.square(np.array(columns) @ costs - 1).sum())


def best_error(columns: Sequence[tuple[float, ...]]) -> float:
    """The least error of all choices of columns whose costs are not negative."""
    matrix, goal = np.array(columns), np.ones(len(columns))
    errors = [float(len(columns))]
    for size in (1, 2, 3):
        for kept in map(list, combinations(range(3), size)):
            found = np.linalg.lstsq(matrix[:, kept], goal)[0]
            if min(found) >= 0:
                errors.append(float(np.square(matrix[:, kept] @ found - goal).sum()))
    return min(errors)


@given(rows)
def test_no_choice_of_columns_is_better(columns: Sequence[tuple[float, ...]]) -> None:
    costs = non_negative_fit(products_of(columns))
    if costs is None:
        assert not np.any(columns)
        return
    assert min(costs) >= 0
    # Each of two more costs must gain something; and squares lose half of the digits.
    assert loss(columns, costs) <= best_error(columns) / (1 - MIN_GAIN) ** 2 + 1e-5 * len(columns)


def test_fewer_costs_win_between_equals() -> None:
    columns = [(2.0 * size, 1.0 * size, 0.0) for size in (1, 2, 3)]
    assert non_negative_fit(products_of(columns)) == pytest.approx([3 / 14, 0, 0])


def test_a_negative_cost_goes_to_the_others() -> None:
    # The best costs of both would be 1.25 and -0.25.
    costs = non_negative_fit(products_of([(1.0, 1.0, 0.0), (0.8, 0.0, 0.0)]))
    assert costs is not None
    assert costs[0] == pytest.approx(1.8 / 1.64)
    assert costs[1:] == [0, 0]


#: Columns that are either the same or differ by more than rounding.
whole_rows = st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=12)


@given(whole_rows)
def test_distinct_share_is_what_numpy_leaves_of_a_column(
    columns: Sequence[tuple[float, ...]],
) -> None:
    matrix = np.array(columns, dtype=float)
    others, column = matrix[:, :2], matrix[:, 2]
    left = column - others @ np.linalg.lstsq(others, column)[0]
    whole = np.square(column).sum()
    expected = np.square(left).sum() / whole if whole else 0
    assert distinct_share(products_of(columns), 2) == pytest.approx(expected, abs=1e-3)


# What batches of each task cost: before the first, after one, and after many


#: Device time of a batch besides its items, and of each item.
BATCH_S, ITEM_S = 0.02, 0.003


def run_many(costs: TaskCosts, task: str = "embed", batches: int = 200) -> None:
    draw = random.Random(1)
    for _ in range(batches):
        items = draw.randint(1, 64)
        costs.ran(task, items, (BATCH_S + ITEM_S * items) * draw.uniform(0.9, 1.1))


def test_nothing_is_known_of_a_task_that_never_ran() -> None:
    costs = TaskCosts()
    costs.ran("label", 8, 0.1)
    assert costs.expected_s("embed", 8) == 8 * UNKNOWN_ITEM_S
    assert costs.max_items("embed", 1.0, cap=64) is None
    assert not costs.is_believable("embed")
    assert costs.figures() == {}


def test_one_batch_is_enough_for_an_estimate_and_not_for_trust() -> None:
    costs = TaskCosts()
    costs.ran("embed", 8, 0.09)
    assert costs.expected_s("embed", 8) == pytest.approx(0.09)
    assert costs.expected_s("embed", 17) == pytest.approx(0.18)
    assert costs.max_items("embed", 0.185, cap=64) == 17
    assert costs.max_items("embed", 0.185, cap=4) == 4
    assert costs.max_items("embed", 0.015, cap=64) == 0
    assert not costs.is_believable("embed")


def test_batch_and_items_are_told_apart() -> None:
    costs = TaskCosts()
    run_many(costs)
    for items in (1, 10, 64):
        assert costs.expected_s("embed", items) == pytest.approx(BATCH_S + ITEM_S * items, rel=0.05)
    assert costs.is_believable("embed")
    figures = costs.figures()["embed"]
    assert figures["item_us"] == pytest.approx(ITEM_S * 1e6, rel=0.05)
    assert figures["pass_ms"] == pytest.approx(BATCH_S * 1e3, rel=0.05)
    assert figures["error"] < 0.1
    assert figures["batches"] == 199 // REFRESH_BATCHES * REFRESH_BATCHES


def test_tasks_know_nothing_of_each_other() -> None:
    costs = TaskCosts()
    run_many(costs)
    costs.ran("label", 64, 0.001)
    assert costs.is_believable("embed")
    assert not costs.is_believable("label")
    assert costs.expected_s("embed", 64) > 0.1
    assert costs.expected_s("label", 64) == pytest.approx(0.001)


def test_devices_of_different_speed_count_as_one_in_between() -> None:
    costs = TaskCosts()
    for number in range(200):
        costs.ran("embed", 9, 1 + number % 2)
    assert 1 < costs.expected_s("embed", 9) < 2
