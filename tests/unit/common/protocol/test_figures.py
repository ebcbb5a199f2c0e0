"""What follows from a worker's figures, and what it has done between two answers."""

from dataclasses import replace
from typing import Any

import pytest

from batchery.protocol.figures import (
    BatchFigures,
    BatchSums,
    DeviceSnapshot,
    WorkerFigures,
    read_figures,
)

EARLIER = BatchFigures(batches=10, items=100, tokens=800, computed_tokens=1000, jobs=40)


def worker(clock_s: float, batches: BatchFigures, **devices: BatchSums) -> WorkerFigures:
    snapshots = {name: DeviceSnapshot("ready", 0, done=done) for name, done in devices.items()}
    return WorkerFigures(snapshots, batches, clock_s)


def test_sums_of_the_time_between_two_answers() -> None:
    later = replace(EARLIER, batches=12, items=130, forward_ms=5.0, failed_jobs=1)
    gained = later.since(EARLIER)
    assert gained is not None
    assert (gained.batches, gained.items, gained.forward_ms, gained.failed_jobs) == (2, 30, 5.0, 1)
    # The worker was restarted meanwhile.
    assert EARLIER.since(later) is None
    assert EARLIER.since(EARLIER) is not None


def test_worker_between_two_answers_has_the_devices_that_were_there_all_the_time() -> None:
    before = worker(100.0, EARLIER, old=BatchSums(items=5), gone=BatchSums(), anew=BatchSums(9))
    later = replace(EARLIER, items=107)
    now = worker(103.5, later, old=BatchSums(items=12), new=BatchSums(3), anew=BatchSums(1))
    gained = now.since(before)
    assert gained is not None
    assert (gained.clock_s, gained.batches.items) == (3.5, 7)
    assert {name: each.done.items for name, each in gained.devices.items()} == {"old": 7}


@pytest.mark.parametrize(
    "before", [None, worker(103.5, EARLIER), worker(104.0, EARLIER), worker(1.0, BatchFigures(99))]
)
def test_without_an_earlier_answer_of_the_same_worker_nothing_is_known(before: Any) -> None:
    assert worker(103.5, EARLIER).since(before) is None


def test_answer_of_something_else_is_none() -> None:
    assert read_figures({"devices": "none"}) is None
    known = read_figures({"devices": {}, "batches": {"items": 3}, "clock_s": 1.0})
    assert known is not None
    assert known.batches.items == 3
