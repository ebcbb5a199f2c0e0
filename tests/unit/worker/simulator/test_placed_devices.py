"""Devices that load models as demand shifts: by the benchmark's simulation, in shorter phases."""

import pytest

from benchmarks.scheduling.placement import (
    BEST,
    DEVICES,
    FIXED,
    LOADS,
    MODELS,
    OURS,
    TURNING,
    Demand,
    find_best,
    list_splits,
    simulate,
)

DEMAND = Demand("turns", TURNING, 12.0)


def test_each_device_has_one_model() -> None:
    splits = list(list_splits())
    assert len(splits) == 45
    assert all(sum(split.values()) == DEVICES for split in splits)


def test_the_best_split_leaves_least_undone() -> None:
    first, second, third = MODELS
    work_s = {first: 43.2, second: 21.6, third: 7.2}
    (phase,) = find_best([work_s], 10.0)
    assert phase.split == {first: 5, second: 2, third: 1}
    assert [phase.work_s, phase.shared_s] == pytest.approx([70.4, 72.0])
    # What is left of a phase is work of the next one.
    nothing_s = dict.fromkeys(MODELS, 0.0)
    late = find_best([{**nothing_s, second: 100.0}, {**nothing_s, first: 20.0}], 10.0)
    assert late[0].split[second] == DEVICES
    assert late[1].split[second] >= 2
    assert late[1].split[first] >= 2
    assert [phase.work_s for phase in late] == [80.0, 40.0]


@pytest.mark.parametrize(("load", "room"), [(LOADS[0], 1), (LOADS[1], 1), (LOADS[0], 2)])
def test_devices_follow_the_demand(load: float, room: int) -> None:
    found = simulate(DEMAND, DEMAND.make_arrivals(load), room)
    assert found[OURS]["work_used"] > 0.88
    if room == 1:
        assert found[BEST]["loads"] == found[FIXED]["loads"] == 0
        assert found[BEST]["work_used"] == pytest.approx(1.0, abs=0.06)
        assert found[FIXED]["work_used"] < found[OURS]["work_used"]
