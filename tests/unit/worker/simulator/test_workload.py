"""Generated jobs: rates, lanes, sizes, and the same for the same seed."""

import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile
from random import Random

import pytest

from batchery_worker.job import Lane
from batchery_worker.simulator import workload as module
from batchery_worker.simulator.workload import (
    BULK,
    PATIENT,
    WORKLOADS,
    Amount,
    Arrival,
    Demand,
    JobKind,
    arrivals,
    bursty_times,
    day_times,
    poisson_times,
    steady_times,
    together,
)

DEMAND = Demand(rate_per_s=1000.0, capacity_per_s=2000.0, seconds=20.0, devices=2)


def until(end_s: float, times_s: Iterator[float]) -> list[float]:
    return list(takewhile(lambda each: each < end_s, times_s))


def test_poisson_times_have_the_rate_and_the_spread_of_the_law() -> None:
    times_s = until(100.0, poisson_times(200.0, Random(1)))
    pauses_s = [after - before for before, after in pairwise(times_s)]
    assert len(times_s) == pytest.approx(20_000, rel=0.03)
    assert statistics.stdev(pauses_s) == pytest.approx(statistics.fmean(pauses_s), rel=0.03)


def test_bursts_have_the_mean_rate_and_more_spread_than_chance_alone() -> None:
    times_s = until(500.0, bursty_times(100.0, Random(1)))
    assert len(times_s) == pytest.approx(50_000, rel=0.1)
    counts = Counter(int(10 * each) for each in times_s)
    per_tenth = [counts[tenth] for tenth in range(5000)]
    assert statistics.variance(per_tenth) > 3 * statistics.fmean(per_tenth)


def test_a_day_is_busiest_at_noon() -> None:
    times_s = until(240.0, day_times(200.0, 24.0, Random(1)))
    hours = Counter(int(each % 24) for each in times_s)
    assert len(times_s) == pytest.approx(48_000, rel=0.03)
    swing = module.DAY_SWING
    assert hours[12] / hours[0] == pytest.approx((1 + swing) / (1 - swing), rel=0.1)


def test_steady_times_have_equal_distances_after_those_at_the_start() -> None:
    assert list(islice(steady_times(10.0, 2), 4)) == [0.0, 0.0, 0.1, 0.2]


def test_lanes_come_as_often_as_they_should() -> None:
    kind = JobKind({Lane("high"): 1.0, Lane("low", "one"): 3.0, Lane("low", "two"): 4.0})
    found = Counter(
        each.lane for each in islice(arrivals(poisson_times(1, Random(2)), kind, Random(3)), 8000)
    )
    assert found[Lane("high")] == pytest.approx(1000, rel=0.1)
    assert found[Lane("low", "two")] == pytest.approx(4000, rel=0.05)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_amounts_have_their_mean_and_are_at_least_one(sigma: float) -> None:
    random = Random(4)
    found = [Amount(40.0, sigma).draw(random) for _ in range(20_000)]
    assert statistics.fmean(found) == pytest.approx(40.0, rel=0.05)
    assert min(found) >= 1
    assert (len(set(found)) > 1) == (sigma > 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_in_order_and_the_same_for_the_same_seed(name: str) -> None:
    found = list(islice(WORKLOADS[name](DEMAND), 5000))
    assert found == list(islice(WORKLOADS[name](DEMAND), 5000))
    assert found != list(islice(WORKLOADS[name](Demand(1000.0, 2000.0, 20.0, 2, seed=1)), 5000))
    assert all(before.time_s <= after.time_s for before, after in pairwise(found))


@pytest.mark.parametrize("name", set(WORKLOADS) - {"bulk"})
def test_a_workload_has_the_rate_that_was_asked_for(name: str) -> None:
    stream = takewhile(lambda each: each.time_s < 20.0, WORKLOADS[name](DEMAND))
    assert sum(1 for _ in stream) == pytest.approx(20_000, rel=0.15)


def test_the_bulk_keeps_all_devices_busy_and_nobody_waits_for_it() -> None:
    found = list(takewhile(lambda each: each.time_s < 10.0, WORKLOADS["bulk"](DEMAND)))
    bulk = [each for each in found if each.lane == BULK]
    assert sum(each.items for each in bulk) >= 10.0 * DEMAND.capacity_per_s
    assert len(found) - len(bulk) == pytest.approx(5000, rel=0.1)
    assert PATIENT["bulk"] == {BULK.priority_class}


def test_one_tenant_sends_half_of_all_jobs() -> None:
    found = Counter(each.lane.tenant for each in islice(WORKLOADS["tenants"](DEMAND), 20_000))
    assert len(found) == 1 + module.SMALL_TENANTS
    assert found["large"] == pytest.approx(10_000, rel=0.2)


def test_streams_together_keep_the_order_of_time() -> None:
    first = iter([Arrival(0.0, "a", BULK), Arrival(2.0, "a", BULK)])
    second = iter([Arrival(1.0, "b", BULK)])
    assert [each.task for each in together(first, second)] == ["a", "b", "a"]
