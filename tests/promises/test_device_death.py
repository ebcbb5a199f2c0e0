"""Kills device processes and workers; every job must end once, for the right reason."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from apps import shop, stages
from batchery import DeviceDied
from conftest import StartWorker
from support.harness import Worker, device_busy, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(autouse=True)
def _apps(redis_url: str) -> None:
    for app in (shop.app, stages.app):
        app.conf.update(broker_url=redis_url, result_backend=redis_url)


def outcome(job: Any) -> Any:
    try:
        return job.get(timeout=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whichever it is, it is compared
        return error


def only_device(worker: Worker) -> psutil.Process:
    """The device process, once there is one."""
    return wait_for(worker.devices, "a device process")[0]


def test_among_64_jobs_the_one_that_raises_and_the_one_that_kills_fail_alone(
    start_worker: StartWorker,
) -> None:
    start_worker("apps.shop")
    # A first job keeps the device busy, so that the others share a batch.
    shop.nap.delay(0.5)
    texts = ["raise" if n == 20 else "die" if n == 40 else f"text {n}" for n in range(64)]
    jobs = shop.nasty.submit_many(texts)
    outcomes = [outcome(job) for job in jobs]
    for number, (text, result) in enumerate(zip(texts, outcomes, strict=True)):
        if number not in (20, 40):
            assert result == text.upper()
    assert isinstance(outcomes[20], KeyError)
    assert isinstance(outcomes[40], DeviceDied)
    assert "its device or worker died; that happened 2 times" in str(outcomes[40])
    assert shop.shout.delay("next").get(timeout=TIMEOUT_S) == "NEXT"


def test_job_that_was_revoked_before_its_device_died_never_runs(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("apps.shop", "-c", "1").wait_answers(shop.app)
    first = only_device(worker)
    gate = tmp_path / "gate"
    with device_busy(worker, shop.app, shop.until.name, gate):
        revoked = shop.until.delay(str(tmp_path / "never"))
        revoked.revoke()
        wait_for(lambda: revoked.id in worker.inspect(shop.app, "revoked"), "it is revoked")
        first.kill()
        wait_for(lambda: only_device(worker).pid != first.pid, "a new device")
    # It would hold up the device for ever.
    assert shop.until.delay(str(gate)).get(timeout=TIMEOUT_S) == str(gate)


def test_a_device_that_is_killed_while_idle_is_replaced(start_worker: StartWorker) -> None:
    worker = start_worker("apps.shop")
    first = only_device(worker)
    first.kill()
    wait_for(lambda: [each for each in worker.devices() if each.pid != first.pid], "a new device")
    assert shop.shout.delay("still here").get(timeout=TIMEOUT_S) == "STILL HERE"
