"""Kills device processes and workers; every job must end once, for the right reason."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from apps import shop, stages
from batchery import DeviceDied
from conftest import StartWorker
from support.harness import Worker, wait_ended, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)


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


def test_a_device_killed_from_outside_loses_nothing(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("apps.stages")
    device, gate = only_device(worker), tmp_path / "gate"
    assert set(stages.served_by.submit_many(range(100)).get(timeout=TIMEOUT_S)) == {device.pid}
    jobs = stages.gated.submit_many(range(200), {"gate": str(gate)})
    wait_for(Path(f"{gate}.begun").exists, "the run has begun")
    device.kill()
    gate.touch()
    answers = jobs.get(timeout=TIMEOUT_S)
    assert len(answers) == 200
    (other,) = set(answers)
    assert other != device.pid


def test_a_device_that_is_killed_while_idle_is_replaced(start_worker: StartWorker) -> None:
    worker = start_worker("apps.shop")
    first = only_device(worker)
    first.kill()
    wait_for(lambda: [each for each in worker.devices() if each.pid != first.pid], "a new device")
    assert shop.shout.delay("still here").get(timeout=TIMEOUT_S) == "STILL HERE"


def test_devices_die_with_a_worker_that_is_killed(start_worker: StartWorker) -> None:
    worker = start_worker("apps.shop")
    # Even in the middle of a forward pass that holds on.
    shop.nap.delay(60)
    wait_for(lambda: busy(worker), "the device is busy")
    device = only_device(worker)
    worker.process.kill()
    worker.wait_exit()
    wait_ended([device])


def busy(worker: Worker) -> bool:
    """Whether a batch is on a device."""
    devices = worker.inspect(shop.app, "stats")["pool"]["devices"]
    return any(device["batches_in_flight"] for device in devices.values())
