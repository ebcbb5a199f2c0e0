"""Costs that come closest to what was measured, none of them negative."""

import math
from collections.abc import Sequence
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import Sums

#: How often each of three costs was paid: columns that do not depend on each other.
COUNTS = [(8, 1, 1), (32, 1, 1), (512, 4, 2), (100, 50, 3), (7, 7, 7), (64, 2, 1)]

numbers = st.floats(0, 1e6)
rows = st.lists(st.tuples(numbers, numbers, numbers), max_size=8)


def dot(row: Sequence[float], costs: Sequence[float]) -> float:
    return sum(map(mul, row, costs), 0.0)


def sums_of(rows: list[tuple[float, ...]]) -> Sums:
    sums = Sums(3)
    for row in rows:
        sums.add(row)
    return sums


def relative(costs: tuple[float, ...]) -> list[tuple[float, ...]]:
    """The rows of `COUNTS`, as they would be measured with these costs."""
    return [tuple(count / dot(counts, costs) for count in counts) for counts in COUNTS]


@given(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.01, 10)))
def test_costs_that_were_paid_are_found(costs: tuple[float, ...]) -> None:
    found = sums_of(relative(costs)).solve()
    assert found is not None
    for counts in COUNTS:
        assert dot(counts, found) == pytest.approx(dot(counts, costs), rel=1e-3)


@given(rows)
def test_no_cost_is_negative_or_no_number(rows: list[tuple[float, ...]]) -> None:
    found = sums_of(rows).solve()
    assert found is None or all(0 <= cost < math.inf for cost in found)


@given(rows, st.tuples(numbers, numbers, numbers))
def test_the_error_is_that_of_the_rows(
    rows: list[tuple[float, ...]], costs: tuple[float, ...]
) -> None:
    costs = tuple(cost * 1e-9 for cost in costs)
    expected = sum((dot(row, costs) - 1) ** 2 for row in rows)
    assert sums_of(rows).error(costs) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_nothing_follows_from_nothing() -> None:
    assert Sums(3).solve() is None
    assert Sums(3).scale((1.0, 1.0, 1.0)) == 0


def test_of_costs_that_always_come_together_the_first_has_it_all() -> None:
    # Two columns that are the same: to share the cost between them explains nothing more.
    found = sums_of([(count, count, 0) for count in (0.1, 0.2, 0.4)]).solve()
    assert found is not None
    assert found[0] > 0
    assert found[1:] == (0, 0)


def test_scale_says_by_how_much_all_costs_are_off() -> None:
    assert sums_of(relative((2.0, 4.0, 6.0))).scale((1.0, 2.0, 3.0)) == pytest.approx(2)


def test_what_fades_counts_less_than_what_comes() -> None:
    faded = sums_of([(1.0, 0, 0)] * 10)
    faded.fade(0.01)
    found = faded.add((0.5, 0, 0), weight=1000).solve()
    assert found is not None
    assert found[0] == pytest.approx(2, rel=1e-3)


def test_a_copy_is_added_to_alone() -> None:
    sums = sums_of([(1.0, 0, 0)])
    sums.copy().add((0.5, 0, 0))
    assert sums.solve() == (1, 0, 0)
