"""Time limits of batch tasks: only the job that exceeds its limit fails."""

from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from apps import shop
from batchery import BatchTask
from conftest import StartWorker
from support.harness import Worker, queue_length, wait_for
from support.patience import TIMEOUT_S, patient


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.shop")


@pytest.mark.parametrize("task", [shop.lazy, shop.lazy_asynchronous], ids=["plain", "async"])
def test_the_soft_limit_is_raised_in_the_function(worker: Worker, task: BatchTask) -> None:
    jobs = task.submit_many([0.0, patient(10.0), 0.0])
    first, slow, last = (jobs[number] for number in range(3))
    with pytest.raises(SoftTimeLimitExceeded):
        slow.get(timeout=TIMEOUT_S)
    assert first.get(timeout=TIMEOUT_S) == last.get(timeout=TIMEOUT_S) == 0.0
    assert task.delay(0.0).get(timeout=TIMEOUT_S) == 0.0


def test_a_job_alone_in_its_batch_runs_once_until_its_hard_limit(worker: Worker) -> None:
    kills = worker.log.count("Hard time limit")
    job = shop.stubborn.delay(60.0)
    with pytest.raises(TimeLimitExceeded):
        job.get(timeout=TIMEOUT_S)
    assert shop.stubborn.delay(0.0).get(timeout=TIMEOUT_S) == 0.0
    assert worker.log.count("Hard time limit") == kills + 1
    assert f"s) exceeded for {shop.stubborn.name}[{job.id}]\n" in worker.log


def test_a_limit_that_is_set_by_remote_control_counts_from_then_on(worker: Worker) -> None:
    name = shop.nap.name
    assert shop.nap.delay(0.0).get(timeout=TIMEOUT_S) == 0.0
    reply: Any = shop.app.control.time_limit(name, soft=1, reply=True, timeout=TIMEOUT_S, limit=1)
    assert "ok" in reply[0][worker.name]
    with pytest.raises(SoftTimeLimitExceeded):
        shop.nap.delay(30.0).get(timeout=TIMEOUT_S)
    shop.app.control.time_limit(name, soft=None, reply=True, timeout=TIMEOUT_S, limit=1)
    assert shop.nap.delay(1.5).get(timeout=TIMEOUT_S) == 1.5


def test_jobs_with_different_limits_never_share_a_batch(worker: Worker) -> None:
    shop.nap.delay(0.5)
    jobs = [
        shop.read_batch.apply_async((number,), time_limit=30 + number % 2) for number in range(10)
    ]
    for number, job in enumerate(jobs):
        assert {mate % 2 for mate in job.get(timeout=TIMEOUT_S)["mates"]} == {number % 2}


def test_a_device_that_gives_no_sign_is_killed_and_its_jobs_run_again(
    start_worker: StartWorker, redis_url: str
) -> None:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.shop", "-Q", "silent", env={"BATCHERY_MAX_PASS_S": str(patient(2))})
    wait_for(lambda: worker.has_logged("is ready, pid", 1), "its device is ready")
    (device,) = worker.devices()
    device.suspend()
    job = shop.shout.apply_async(("a",), queue="silent")
    assert job.get(timeout=TIMEOUT_S) == "A"
    wait_for(lambda: not device.is_running(), "the silent process is gone")


def test_a_device_that_hangs_again_and_again_ends_its_worker(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.shop", "-Q", "hangs", env={"BATCHERY_MAX_PASS_S": str(patient(1))})
    # The first becomes a dead letter, as it hung beside nobody twice; the second ends the worker.
    for number in range(2):
        path = str(tmp_path / f"never {number}")
        shop.until.apply_async((path,), queue="hangs", time_limit=3600 + number)
    assert worker.wait_exit(patient(120)) == 2
    assert "hung 5 times in a row" in worker.log
    assert queue_length(redis_url, "hangs") == 1
