"""Sums and means over batches."""

import json

from batchery_worker.metrics import Metrics


def test_a_worker_without_batches_has_no_means() -> None:
    snapshot = Metrics().snapshot()
    assert snapshot["batches"] == snapshot["jobs"] == 0
    assert snapshot["mean_batch_size"] is None
    assert snapshot["padding_waste"] is None
    assert snapshot["batch_sizes"] == {}


def test_means_and_waste_follow_from_the_sums() -> None:
    metrics = Metrics()
    metrics.batch_done(jobs=2, items=4, waited_ms=30, forward_ms=10, tokens=(75, 100))
    metrics.batch_done(jobs=4, items=8, waited_ms=30, forward_ms=30, tokens=(75, 100))
    snapshot = metrics.snapshot()
    assert (snapshot["batches"], snapshot["jobs"], snapshot["items"]) == (2, 6, 12)
    assert snapshot["mean_batch_size"] == 6
    assert (snapshot["waited_ms"], snapshot["forward_ms"]) == (60, 40)
    assert snapshot["mean_waited_ms"] == 10
    assert snapshot["mean_forward_ms"] == 20
    assert snapshot["padding_waste"] == 0.25
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_sizes_are_counted_by_the_next_power_of_two() -> None:
    metrics = Metrics()
    for items in (1, 2, 3, 4, 5, 64, 65):
        metrics.batch_done(jobs=1, items=items, waited_ms=0, forward_ms=0, tokens=(0, 0))
    assert metrics.snapshot()["batch_sizes"] == {
        "<=1": 1,
        "<=2": 1,
        "<=4": 2,
        "<=8": 1,
        "<=64": 1,
        "<=128": 1,
    }
