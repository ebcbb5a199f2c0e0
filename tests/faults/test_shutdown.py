"""Ends workers in every way there is; every job has one result in the end, and none is lost."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery.result import ResultSet

from apps import ledger, slow_start
from apps.ledger import executions
from conftest import StartWorker
from support.harness import messages_in, queue_length, unsettled, wait_ended, wait_for
from support.patience import TIMEOUT_S, patient

JOBS = 500


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    ledger.app.conf.update(broker_url=redis_url, result_backend=redis_url)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def submit(book: Path, **keywords: Any) -> ResultSet:
    return ledger.write_down.submit_many(range(JOBS), {"ledger": str(book), **keywords})


def wait_for_batch(book: Path, items: int = 1) -> None:
    wait_for(lambda: len(executions(book)) >= items, f"{items} items executed")


def hang(book: Path) -> Any:
    """A job in the middle of a forward pass that does not end."""
    job = ledger.write_down.delay("hanging", ledger=str(book), pause_s=600)
    wait_for_batch(book)
    return job


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def waiting(store: Any) -> set[str]:
    """The ids of the jobs in the queue."""
    found = messages_in(store, ledger.write_down.name)
    return {json.loads(each)["headers"]["id"] for each in found}


def test_a_warm_shutdown_takes_nothing_more_and_executes_every_job_once(
    start_worker: StartWorker, book: Path, redis_url: str, tmp_path: Path, store: Any
) -> None:
    # They are in the queue before the worker is, so that batches are full.
    gate = tmp_path / "gate"
    jobs = submit(book, pause_s=0.5, gate=str(gate))
    worker = start_worker("apps.ledger", ready=False)
    wait_for_batch(book, 64)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in worker.log, "shutdown begun")
    late = [
        ledger.write_down.delay("late", ledger=str(book)),
        ledger.write_down_alone.delay("late alone", str(book)),
    ]
    left = waiting(store)
    gate.touch()
    assert worker.wait_exit() == 0, worker.log
    finished = len(executions(book))
    assert 64 <= finished < JOBS
    assert sum(job.ready() for job in jobs) == finished
    # All that was in the queue at the signal still is, and what came later.
    assert late[0].id in left
    assert waiting(store) >= left
    assert queue_length(redis_url) == JOBS + len(late) - finished
    assert unsettled(redis_url) == 0
    start_worker("apps.ledger")
    assert jobs.get(timeout=TIMEOUT_S) == list(range(JOBS))
    assert [job.get(timeout=TIMEOUT_S) for job in late] == ["late", "late alone"]
    assert Counter(executions(book)) == Counter([*map(str, range(JOBS)), "late", "late", "alone"])


def test_a_cold_shutdown_loses_no_job(
    start_worker: StartWorker, book: Path, redis_url: str
) -> None:
    jobs = submit(book, pause_s=0.5)
    worker = start_worker("apps.ledger", ready=False)
    wait_for_batch(book, 64)
    devices = worker.devices()
    worker.stop(signal.SIGQUIT)
    wait_ended(devices)
    started = len(executions(book))
    finished = sum(job.ready() for job in jobs)
    assert queue_length(redis_url) == JOBS - finished, worker.log
    start_worker("apps.ledger")
    assert jobs.get(timeout=TIMEOUT_S) == list(range(JOBS))
    # What ran when the worker was told to drop it runs again; nothing else does.
    assert len(executions(book)) == JOBS + started - finished


def test_a_second_sigterm_changes_nothing(
    start_worker: StartWorker, book: Path, tmp_path: Path
) -> None:
    worker, gate = start_worker("apps.ledger"), tmp_path / "gate"
    job = ledger.write_down.delay("x", ledger=str(book), gate=str(gate))
    wait_for_batch(book)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in worker.log, "shutdown begun")
    worker.process.send_signal(signal.SIGTERM)
    gate.touch()
    assert worker.wait_exit() == 0, worker.log
    assert job.get(timeout=TIMEOUT_S) == "x"


def test_ctrl_c_in_the_terminal_is_a_warm_shutdown(start_worker: StartWorker, book: Path) -> None:
    worker = start_worker("apps.ledger")
    job = ledger.write_down.delay("x", ledger=str(book), pause_s=1.5)
    wait_for_batch(book)
    # The terminal sends it to the whole process group: to the devices, too.
    for device in worker.devices():
        device.send_signal(signal.SIGINT)
    # The exit code is Celery's own.
    assert worker.stop(signal.SIGINT) == 1, worker.log
    assert job.get(timeout=TIMEOUT_S) == "x"


@pytest.mark.parametrize("second", [signal.SIGQUIT, signal.SIGINT])
def test_a_worker_that_waits_for_a_hanging_batch_can_be_ended(
    start_worker: StartWorker, book: Path, redis_url: str, second: int
) -> None:
    worker = start_worker("apps.ledger")
    hang(book)
    (device,) = worker.devices()
    first = signal.SIGINT if second == signal.SIGINT else signal.SIGTERM
    worker.process.send_signal(first)
    wait_for(lambda: "Warm shutdown" in worker.log, "shutdown begun")
    worker.stop(second)
    assert "Traceback" not in worker.log
    wait_for(lambda: is_gone(device), "the device is gone")
    wait_for(lambda: queue_length(redis_url) == 1, "the job is back")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_can_be_ended_while_its_devices_start(
    start_worker: StartWorker, number: int, redis_url: str, tmp_path: Path
) -> None:
    slow_start.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.slow_start", ready=False, env={"GATE_FOLDER": str(tmp_path)})
    wait_for((tmp_path / "loading").exists, "its model is being loaded")
    (device,) = worker.devices()
    device.suspend()  # It never gets ready.
    job = slow_start.app.tasks["slow"].delay("x")
    assert worker.stop(number) == 0, worker.log
    assert "Traceback" not in worker.log
    wait_for(lambda: is_gone(device), "the device is gone")
    assert queue_length(redis_url, "slow") == 1
    assert not job.ready()


def test_a_soft_shutdown_lets_short_batches_finish(
    start_worker: StartWorker, book: Path, redis_url: str, tmp_path: Path
) -> None:
    worker = start_worker("apps.ledger", env={"SOFT_SHUTDOWN_S": str(patient(3))})
    gate = tmp_path / "gate"
    job = ledger.write_down.delay("x", ledger=str(book), gate=str(gate))
    wait_for_batch(book)
    # A worker without active jobs waits for nothing.
    wait_for(lambda: worker.inspect(ledger.app, "active"), "the job is active")
    worker.process.send_signal(signal.SIGQUIT)
    wait_for(lambda: "Initiating Soft Shutdown" in worker.log, "shutdown begun")
    gate.touch()
    worker.wait_exit()
    assert job.ready(), worker.log
    assert queue_length(redis_url) == 0


def test_sigterm_can_be_remapped_to_a_cold_shutdown(
    start_worker: StartWorker, book: Path, redis_url: str
) -> None:
    worker = start_worker("apps.ledger", env={"REMAP_SIGTERM": "SIGQUIT"})
    hang(book)
    worker.stop(signal.SIGTERM)
    wait_for(lambda: queue_length(redis_url) == 1, "the job is back")


def test_a_device_that_dies_during_a_warm_shutdown_is_not_waited_for(
    start_worker: StartWorker, book: Path, redis_url: str
) -> None:
    worker = start_worker("apps.ledger")
    hang(book)
    (device,) = worker.devices()
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in worker.log, "shutdown begun")
    device.kill()
    assert worker.wait_exit() == 0, worker.log
    assert queue_length(redis_url) == 1


def test_batches_finish_while_an_ordinary_task_delays_the_shutdown(
    start_worker: StartWorker, book: Path, tmp_path: Path
) -> None:
    worker, gate = start_worker("apps.ledger"), tmp_path / "gate"
    slow = ledger.write_down_alone.delay("slow", str(book), str(gate))
    batch = ledger.write_down.delay("batch", ledger=str(book), pause_s=1)
    wait_for_batch(book, 2)
    worker.process.send_signal(signal.SIGTERM)
    assert batch.get(timeout=TIMEOUT_S) == "batch"
    assert not slow.ready()
    gate.touch()
    assert worker.wait_exit() == 0
    assert slow.get(timeout=TIMEOUT_S) == "slow"
