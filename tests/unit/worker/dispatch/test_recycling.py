"""When a device process has served long enough."""

import os

import pytest

from batchery_worker.dispatch import recycling
from batchery_worker.dispatch.recycling import RecyclingLimits
from batchery_worker.memory import resident_kib

HERE = os.getpid()


@pytest.mark.parametrize(("jobs", "reached"), [(0, False), (9, False), (10, True), (64, True)])
def test_process_is_recycled_after_the_batch_that_reaches_the_limit(
    jobs: int, reached: bool
) -> None:
    assert RecyclingLimits(max_jobs=10).reached(jobs, HERE) is reached


@pytest.mark.parametrize(("held_kib", "reached"), [(99, False), (100, False), (101, True)])
def test_memory_limit_holds_in_addition_to_the_job_limit(
    monkeypatch: pytest.MonkeyPatch, held_kib: int, reached: bool
) -> None:
    monkeypatch.setattr(recycling, "resident_kib", lambda _: held_kib)
    assert RecyclingLimits(max_jobs=10, max_memory_bytes=100 * 1024).reached(1, HERE) is reached


@pytest.mark.parametrize("limits", [RecyclingLimits(), RecyclingLimits(0, 0)])
def test_no_limit_is_never_reached(limits: RecyclingLimits) -> None:
    assert not limits.reached(10**9, HERE)


def test_memory_limit_is_ignored_if_the_system_reports_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recycling, "resident_kib", lambda _: None)
    assert not RecyclingLimits(max_memory_bytes=1).reached(1, HERE)


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert resident_kib(2**30) is None
