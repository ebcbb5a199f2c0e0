"""Device processes that are replaced by fresh ones, on purpose: no job notices."""

from pathlib import Path
from typing import Any

import pytest

from apps import hybrid, stages
from conftest import StartWorker
from support.harness import TESTS, Worker, wait_for
from support.patience import TIMEOUT_S

PROGRAM = """
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("edited", set_as_current=False))
app.conf.worker_pool_restarts = True
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask)
def version(items):
    return ["{version}" for _ in items]
"""


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    stages.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def wave(jobs: int, pause_s: float = 0.0) -> list[int]:
    """Runs that many jobs; returns which processes answered."""
    results = stages.served_by.submit_many(range(jobs), {"pause_s": pause_s})
    answers: list[int] = results.get(timeout=TIMEOUT_S)
    return answers


def assert_nothing_died(worker: Worker) -> None:
    assert "died" not in worker.log
    stats = worker.inspect(stages.app, "stats")["pool"]
    assert stats["batches"]["device_restarts"] == 0
    assert stats["batches"]["failed_jobs"] == 0


def test_a_device_that_has_run_enough_jobs_gets_a_fresh_process(start_worker: StartWorker) -> None:
    worker = start_worker("apps.stages", env={"BATCHERY_DEVICE_MAX_JOBS": "5"})
    pids = [set(wave(5)) for _ in range(3)]
    assert len(set.union(*pids)) == 3
    # With more at once than a process may run, every job still has one answer.
    assert len(wave(100, 0.05)) == 100
    assert_nothing_died(worker)


def test_a_device_that_holds_too_much_memory_gets_a_fresh_process(
    start_worker: StartWorker,
) -> None:
    # Less than any interpreter needs, so each batch is nearly the last one.
    worker = start_worker("apps.stages", env={"BATCHERY_DEVICE_MAX_MEMORY_BYTES": "1000000"})
    seen: set[int] = set()

    def run_again() -> bool:
        seen.update(wave(1))
        return len(seen) == 3

    wait_for(run_again, "two fresh processes", TIMEOUT_S)
    assert_nothing_died(worker)
    assert "raise device_max_jobs or device_max_memory_bytes" in worker.log


def test_limits_of_the_pool_are_no_limits_of_devices(
    start_worker: StartWorker, redis_url: str
) -> None:
    flags = ("--max-tasks-per-child", "1", "--max-memory-per-child", "1000")
    start_worker("apps.hybrid", "-c", "1", "-Q", "celery,devices", *flags)
    hybrid.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    processes = {hybrid.pid.delay().get(timeout=TIMEOUT_S) for _ in range(3)}
    assert len(processes) == 3
    devices = {hybrid.device_pid.delay(0).get(timeout=TIMEOUT_S) for _ in range(3)}
    assert len(devices) == 1


def test_a_pool_restart_lets_what_runs_finish(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker("apps.stages")
    (before,) = set(wave(1))
    gate = tmp_path / "gate"
    running = stages.gated.delay(0, gate=str(gate))
    wait_for(Path(f"{gate}.begun").exists, "the job runs")
    control: Any = stages.app.control
    (reply,) = control.pool_restart(
        destination=[worker.name], reply=True, timeout=TIMEOUT_S, limit=1
    )
    assert reply[worker.name] == {"ok": "reload started"}
    waiting = stages.served_by.submit_many(range(10))
    gate.touch()
    assert running.get(timeout=TIMEOUT_S) == before
    assert before not in waiting.get(timeout=TIMEOUT_S)
    assert_nothing_died(worker)


def test_a_pool_restart_runs_the_code_as_it_is_now(
    start_worker: StartWorker, tmp_path: Path, redis_url: str
) -> None:
    program = tmp_path / "edited.py"
    program.write_text(PROGRAM.format(version="first"))
    env = {"PYTHONPATH": f"{tmp_path}:{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
    worker = start_worker("edited", env=env)

    def version() -> str:
        job = stages.app.send_task("edited.version", ["x"])
        return str(job.get(timeout=TIMEOUT_S))

    assert version() == "first"
    program.write_text(PROGRAM.format(version="second"))
    stages.app.control.pool_restart(
        destination=[worker.name], reply=True, timeout=TIMEOUT_S, limit=1
    )
    wait_for(lambda: version() == "second", "the new code runs")
