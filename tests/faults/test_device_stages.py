"""Device processes that end, or stop, at each stage of a batch: no job is lost, none fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from apps import stages
from batchery import BatchTask
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    stages.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.stages")


@pytest.fixture
def device(worker: Worker) -> psutil.Process:
    """The device process, idle."""

    def idle() -> psutil.Process | None:
        (state,) = worker.inspect(stages.app, "stats")["pool"]["devices"].values()
        # Results of an earlier test may be stored before the worker knows that their batch ended.
        is_idle = state["state"] == "ready" and not state["batches_in_flight"]
        return psutil.Process(state["pid"]) if is_idle else None

    found = wait_for(idle, "a device that is idle")
    assert found
    return found


@pytest.mark.parametrize("stage", [stages.prepared, stages.computed, stages.committed])
def test_a_device_that_dies_at_any_stage_loses_nothing(
    worker: Worker, device: psutil.Process, tmp_path: Path, stage: BatchTask
) -> None:
    marker = tmp_path / "marker"
    jobs = [stage.delay(str(marker)) for _ in range(2)]
    wait_for(lambda: marker.exists() and marker.read_text(), "the stage is reached")
    assert marker.read_text() == str(device.pid)
    device.kill()
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == [str(marker)] * 2
    assert worker.process.poll() is None


@pytest.mark.usefixtures("worker")
def test_a_device_that_dies_before_it_has_read_its_batch_loses_nothing(
    device: psutil.Process,
) -> None:
    device.suspend()
    jobs = stages.lengths.submit_many(["x" * 3_000_000] * 4)
    device.kill()
    assert jobs.get(timeout=TIMEOUT_S) == [3_000_000] * 4


class Gate:
    """Holds a batch back on the device until it is opened."""

    def __init__(self, path: Path) -> None:
        self.keywords = {"gate": str(path)}
        self._path = path

    def has_begun(self) -> bool:
        return Path(f"{self._path}.begun").exists()

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that is open when the test is over: other tests need the device."""
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


@pytest.mark.usefixtures("worker")
def test_a_device_that_hangs_is_ended_by_the_hard_limit_of_its_only_job(
    device: psutil.Process, gate: Gate
) -> None:
    job = stages.gated.apply_async((0,), gate.keywords, time_limit=2)
    wait_for(gate.has_begun, "the batch runs")
    device.suspend()
    with pytest.raises(TimeLimitExceeded):
        job.get(timeout=TIMEOUT_S)
    assert stages.limited.delay(0.0).get(timeout=TIMEOUT_S) == 0.0
    assert not device.is_running() or device.status() == psutil.STATUS_ZOMBIE


def held(worker: Worker) -> int:
    """Jobs that the worker has and has not settled."""
    jobs = [*worker.inspect(stages.app, "active"), *worker.inspect(stages.app, "reserved")]
    return len({each["id"] for each in jobs})


def shared_batch(
    worker: Worker, directory: Path, task: BatchTask, items: list[Any], **keywords: Any
) -> list[Any]:
    """Jobs that share a batch: the device is busy until all are in Redis."""
    first = Gate(directory / "first")
    busy = stages.gated.delay(0, **first.keywords)
    wait_for(first.has_begun, "the device is busy")
    jobs = list(task.submit_many(items, keywords))
    first.open()
    busy.get(timeout=TIMEOUT_S)
    return jobs


@pytest.mark.usefixtures("device")
def test_job_among_64_beyond_its_hard_limit_fails_alone(worker: Worker, tmp_path: Path) -> None:
    seconds = [60.0 if number == 40 else 0.0 for number in range(64)]
    jobs = shared_batch(worker, tmp_path, stages.limited, seconds)
    with pytest.raises(TimeLimitExceeded):
        jobs[40].get(timeout=TIMEOUT_S)
    others = [job.get(timeout=TIMEOUT_S) for number, job in enumerate(jobs) if number != 40]
    assert others == [0.0] * 63


def test_terminated_job_among_64_active_jobs_ends_alone(
    worker: Worker, device: psutil.Process, tmp_path: Path, gate: Gate
) -> None:
    jobs = shared_batch(worker, tmp_path, stages.gated, list(range(64)), **gate.keywords)
    wait_for(gate.has_begun, "the batch runs")
    ids = {job.id for job in jobs}
    # The job before has its result; the worker may not have settled it yet.
    wait_for(
        lambda: {each["id"] for each in worker.inspect(stages.app, "active")} == ids,
        "all are active",
    )
    stages.app.control.revoke(jobs[40].id, terminate=True, reply=True, timeout=TIMEOUT_S, limit=1)
    with pytest.raises(TaskRevokedError):
        jobs[40].get(timeout=TIMEOUT_S)
    gate.open()
    others = [job.get(timeout=TIMEOUT_S) for number, job in enumerate(jobs) if number != 40]
    assert others == [device.pid] * 63


def test_a_device_that_hangs_ends_once_all_jobs_of_its_batch_are_terminated(
    worker: Worker, device: psutil.Process, tmp_path: Path, gate: Gate
) -> None:
    # The worker learns that such batches are short: it does not wait for the end of the next one.
    short = Gate(tmp_path / "short")
    short.open()
    for job in shared_batch(worker, tmp_path, stages.gated, list(range(3)), **short.keywords):
        assert job.get(timeout=TIMEOUT_S) == device.pid
    other = tmp_path / "other"
    other.mkdir()
    jobs = shared_batch(worker, other, stages.gated, list(range(3)), **gate.keywords)
    wait_for(gate.has_begun, "the batch runs")
    behind = stages.lengths.submit_many(["behind"] * 64)
    wait_for(lambda: worker.batches_in_flight(stages.app) == 2, "another batch is on the device")
    stages.app.control.revoke([job.id for job in jobs], terminate=True)
    assert behind.get(timeout=TIMEOUT_S) == [len("behind")] * 64
    assert not device.is_running() or device.status() == psutil.STATUS_ZOMBIE
    for job in jobs:
        with pytest.raises(TaskRevokedError):
            job.get(timeout=TIMEOUT_S)
    # The caller has a result before the worker has settled its job.
    wait_for(lambda: held(worker) == 0, "nothing is left")
