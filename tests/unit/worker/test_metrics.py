"""Sums and means over batches."""

import json
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from batchery.protocol.figures import read_figures, report
from batchery_worker.batch import DeviceBatch, JobAnswer
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.job import Batch, BatchKey, Job, Limits
from batchery_worker.metrics import MAX_REASONS, Metrics
from batchery_worker.work import Work


def batch(
    items: int,
    *sent_ago_s: float,
    task: str = "shout",
    forward_ms: float = 0.0,
    statuses: Sequence[str] = (),
    **more: Any,
) -> DeviceBatch:
    """A batch of one job, or of one for each time since it was sent; it left now."""
    now_s = time.monotonic()
    jobs = tuple(
        Job(
            *("id", BatchKey(task), Limits(64), items if at == 0 else 0, now_s - 0.02),
            payload=cast(Any, None),
            waited_s=ago_s - 0.02,
        )
        for at, ago_s in enumerate(sent_ago_s or (0.02,))
    )
    return DeviceBatch(
        cast(Any, None),
        Work(1, task, {}, (), 64, None),
        Batch(jobs),
        now_s,
        prepare_ms=1.0,
        queued_ms=2.0,
        forward_ms=forward_ms,
        tokens=75,
        computed_tokens=100,
        commit_ms=3.0,
        answers=[JobAnswer(CommitStatus(each)) for each in statuses or ["committed"] * len(jobs)],
        **more,
    )


def test_means_and_waste_follow_from_the_sums() -> None:
    metrics = Metrics()
    metrics.batch_done(batch(4, 15.0, 0.5, forward_ms=10), 4)
    metrics.batch_done(batch(8, *[2.0] * 4, forward_ms=30), 8)
    snapshot = metrics.snapshot()
    assert (snapshot["batches"], snapshot["jobs"], snapshot["items"]) == (2, 6, 12)
    assert snapshot["mean_batch_size"] == 6
    # From sending, though all of them came to the worker a moment ago.
    assert snapshot["waited_ms"] == pytest.approx(23_500)
    assert snapshot["mean_waited_ms"] == pytest.approx(23_500 / 6, abs=0.01)
    assert snapshot["forward_ms"] == 40
    assert snapshot["mean_forward_ms"] == 20
    assert (snapshot["prepare_ms"], snapshot["queued_ms"], snapshot["commit_ms"]) == (2, 4, 6)
    assert (snapshot["mean_prepare_ms"], snapshot["mean_commit_ms"]) == (1, 3)
    assert snapshot["padding_waste"] == 0.25
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_sizes_are_counted_by_the_next_power_of_two() -> None:
    metrics = Metrics()
    for items in (1, 2, 3, 4, 5, 64, 65):
        metrics.batch_done(batch(items), items)
    assert metrics.snapshot()["tasks"]["shout"]["batch_sizes"] == {
        "1.0": 1,
        "2.0": 1,
        "4.0": 2,
        "8.0": 1,
        "64.0": 1,
        "128.0": 1,
    }


def reused(task: str, **counts: Any) -> DeviceBatch:
    return batch(1, task=task, reused=counts)


def test_the_items_of_each_cache_are_counted_by_how_they_got_their_results() -> None:
    metrics = Metrics()
    told = {"errors": 1, "error": "no"}
    for each in (
        reused("embed", items=8, hits=4, deduplicated=2, computed=2),
        reused("embed", items=2, hits=1, deduplicated=0, computed=1, **told),
        reused("mood", items=0, hits=0, deduplicated=0, computed=0),
    ):
        metrics.batch_done(each, 1)
    caches = metrics.snapshot()["caches"]
    assert caches["embed"] == {
        "items": 10,
        "hits": 5,
        "deduplicated": 2,
        "computed": 3,
        "hit_rate": 0.7,
        **told,
    }
    assert caches["mood"]["hit_rate"] is None


def test_sums_of_a_device_are_those_of_its_batches() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.batch_done(batch(4, forward_ms=10), 4)
    assert metrics.sums() == {
        "batches": 2,
        "items": 8,
        "forward_ms": 20,
        "tokens": 150,
        "computed_tokens": 200,
        "mean_batch_size": 4,
        "padding_waste": 0.25,
    }


def test_failures_are_counted_by_class_of_their_error() -> None:
    metrics = Metrics()
    metrics.job_failed("shout", "ValueError")
    told = {"InvalidItem": 3, "ValueError": 1}
    metrics.batch_done(batch(9, forward_ms=1, statuses=["committed"] * 2, failed_items=told), 9)
    snapshot = metrics.snapshot()
    assert (snapshot["failed_jobs"], snapshot["failed_items"]) == (1, 4)
    assert snapshot["failures"] == {"InvalidItem": 3, "ValueError": 2}


def test_errors_of_ever_new_classes_are_counted_together() -> None:
    metrics = Metrics()
    for number in range(MAX_REASONS + 7):
        metrics.job_failed("shout", f"Error{number}")
    failures = metrics.snapshot()["failures"]
    assert len(failures) == MAX_REASONS + 1
    assert failures["others"] == 7


def test_who_asks_a_worker_reads_the_figures_that_it_counted() -> None:
    metrics = Metrics()
    metrics.batch_done(batch(4, forward_ms=10, statuses=["committed"] * 2), 4)
    metrics.job_failed("shout", "ValueError")
    metrics.batch_done(reused("embed", items=8, hits=4, deduplicated=2, computed=2), 1)
    answer = {"devices": {}, "clock_s": 1.0, "batches": metrics.snapshot()}
    figures = read_figures(json.loads(json.dumps(answer)))
    assert figures is not None
    assert report(figures.batches) == metrics.snapshot()


def test_each_task_has_sums_of_its_own() -> None:
    metrics = Metrics()
    metrics.batch_done(batch(4, forward_ms=10, statuses=["committed"] * 2), 4)
    metrics.batch_done(batch(1, task="embed", forward_ms=5), 1)
    metrics.batch_done(batch(3, forward_ms=1, statuses=["committed", "needs tracer", "fenced"]), 3)
    metrics.job_ended("shout", "succeeded")
    metrics.job_failed("shout", "ValueError")
    metrics.job_failed("shout", "DeadlineExceeded")
    shout, embed = metrics.tasks["shout"], metrics.tasks["embed"]
    assert (shout.batches, shout.items, shout.forward_ms, shout.tokens) == (2, 7, 11, 150)
    assert shout.outcomes == {"succeeded": 4, "failed": 1, "shed": 1}
    assert shout.batch_sizes == {4: 2}
    assert (embed.batches, embed.outcomes, embed.batch_sizes) == (1, {"succeeded": 1}, {1: 1})


def test_waits_count_from_when_jobs_were_sent() -> None:
    metrics = Metrics()
    metrics.batch_done(batch(3, 0.09, 0.3, 4000.0, forward_ms=1), 3)
    found = metrics.tasks["shout"]
    assert found.waits == {0.1: 1, 0.5: 1, float("inf"): 1}
    assert found.waited_s == pytest.approx(4000.39)
