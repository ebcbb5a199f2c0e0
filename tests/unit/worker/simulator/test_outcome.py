"""Percentiles, fairness and what else is counted."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.job import Lane
from batchery_worker.simulator.engine import Fleet, ServiceTime
from batchery_worker.simulator.outcome import LaneOutcome, SimulatedRun, jain, percentile


def test_percentiles_of_a_hundred_values_are_the_values() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [percentile(values, each) for each in (0.01, 0.5, 0.95, 0.99, 1.0)] == [
        1,
        50,
        95,
        99,
        100,
    ]
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1.0))
def test_a_percentile_is_the_smallest_value_that_enough_are_not_above(
    values: list[float], share: float
) -> None:
    found = percentile(sorted(values), share)
    assert found is not None
    enough = share * len(values) - 1e-6
    assert sum(each <= found for each in values) >= enough
    assert not any(
        sum(each <= less for each in values) > enough + 1e-5 for less in values if less < found
    )


@pytest.mark.parametrize(
    ("shares", "index"), [([3.0] * 4, 1.0), ([5.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 3.0], 0.8)]
)
def test_jain_s_index_is_one_for_equals_and_a_part_for_a_winner(
    shares: Sequence[float], index: float
) -> None:
    assert jain(shares) == pytest.approx(index)


def test_jain_s_index_of_nothing_is_none() -> None:
    assert jain([0.0, 0.0]) is None


def test_lanes_that_have_what_their_class_and_number_give_them_are_fair() -> None:
    """Half of the time for one class, half for the two tenants of another."""
    outcome = SimulatedRun()
    for lane, contended_s in {
        Lane("high"): 10.0,
        Lane("low", "one"): 5.0,
        Lane("low", "two"): 5.0,
    }.items():
        outcome.lanes[lane] = LaneOutcome(contended_s=contended_s)
    assert outcome.fairness({"high": 50.0, "low": 50.0}) == pytest.approx(1.0)
    assert outcome.fairness({"high": 10.0, "low": 90.0}) == pytest.approx(0.486, abs=0.001)


def test_jobs_that_were_never_done_have_missed_the_target() -> None:
    lane = LaneOutcome(shed=2, left=1)
    lane.latencies_s.extend([0.1, 0.2, 0.3])
    assert (lane.jobs, lane.missed(0.2), lane.missed(1.0)) == (6, 4, 3)


def test_capacity_is_that_of_full_batches_on_all_devices() -> None:
    service = ServiceTime(pass_ms=10.0, item_ms=1.0, token_ms=0.1)
    assert Fleet(2, service).capacity_per_s(10) == pytest.approx(1000)
    assert Fleet(2, service, {0: 2.0}).capacity_per_s(10) == pytest.approx(750)
    assert Fleet(2, service).capacity_per_s(10, tokens=20) == pytest.approx(500)
