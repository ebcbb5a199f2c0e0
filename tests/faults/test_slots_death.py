"""Kills devices and workers whose jobs are in slots: each ends once, and the culprit is found."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import slots
from batchery import DeviceDied
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import patient

TIMEOUT_S = patient(90)

SERVE = ("-c", "1", "-Q", "countdown")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    slots.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def begin(count: int, folder: Path, **keywords: Any) -> list[Any]:
    """Sends jobs that wait for a gate, each of which notes when it joins."""
    gates = {"gate": str(folder / "gate"), "notes": str(folder / "notes")}
    return [slots.countdown.apply_async((2,), {**gates, **keywords}) for _ in range(count)]


def have_joined(folder: Path, count: int) -> bool:
    return len(slots.noted(folder / "notes")) >= count


def groups(folder: Path) -> list[int]:
    """The largest number of jobs that each process had in slots, in order."""
    largest: dict[str, int] = {}
    for _, count, pid in slots.noted(folder / "notes"):
        largest[pid] = max(largest.get(pid, 0), int(count))
    return list(largest.values())


def test_job_that_kills_is_found_in_halves_and_all_others_succeed(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("apps.slots", *SERVE)
    innocent = begin(3, tmp_path)
    wait_for(lambda: have_joined(tmp_path, 3), "they have joined")
    (poison,) = begin(1, tmp_path, kill="kill")
    wait_for(lambda: have_joined(tmp_path, 6), "half of them run again")
    (tmp_path / "gate").touch()
    with pytest.raises(DeviceDied, match=r"running alone when .* that happened 2 times"):
        poison.get(timeout=TIMEOUT_S)
    for job in innocent:
        job.get(timeout=TIMEOUT_S)
    # Among all; among two; and twice alone.
    assert max(groups(tmp_path)[1:]) == 2
    assert worker.inspect(slots.app, "stats")["pool"]["batches"]["device_restarts"] <= 5
    (again,) = begin(1, tmp_path)
    again.get(timeout=TIMEOUT_S)


def test_jobs_of_a_killed_worker_run_elsewhere_in_halves(
    start_worker: StartWorker, tmp_path: Path, client: Celery
) -> None:
    first: Worker = start_worker("apps.slots", *SERVE)
    jobs = begin(4, tmp_path)
    wait_for(lambda: have_joined(tmp_path, 4), "all slots are taken")
    first.kill()
    # A death counts only if who looks on was never held up for half of its own expiry.
    second = start_worker("apps.slots", *SERVE, env={"LEASE_EXPIRY_S": str(patient(5))})
    wait_for(lambda: have_joined(tmp_path, 6), "two of them run again", TIMEOUT_S)
    (tmp_path / "gate").touch()
    (device,) = second.devices()
    assert {job.get(timeout=TIMEOUT_S)["pid"] for job in jobs} == {device.pid}
    assert groups(tmp_path) == [4, 2]
    assert client.AsyncResult(jobs[0].id).state == "SUCCESS"
