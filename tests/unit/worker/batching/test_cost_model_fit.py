"""Least squares without numpy: as good as any choice of columns that numpy tries."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import MIN_GAIN, distinct_share, non_negative_fit

#: Columns of all sizes: tokens per millisecond are thousands, passes per millisecond fractions.
value = st.one_of(st.just(0.0), st.floats(1e-3, 1e4))
rows = st.lists(st.tuples(value, value, value), min_size=1, max_size=12)


def products_of(columns: Sequence[tuple[float, ...]]) -> list[list[float]]:
    matrix = np.array([(*row, 1.0) for row in columns])
    found: list[list[float]] = (matrix.T @ matrix).tolist()
    return found


def error(columns: Sequence[tuple[float, ...]], costs: list[float]) -> float:
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
    assert error(columns, costs) <= best_error(columns) / (1 - MIN_GAIN) ** 2 + 1e-5 * len(columns)


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
