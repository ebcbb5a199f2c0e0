"""How device processes end: what they tell the app, and what becomes of their children."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from apps import households, offspring
from apps.ledger import executions
from batchery_worker.device_pool.process import LEAVE_TIMEOUT_S
from conftest import StartWorker
from support.harness import has_ended, wait_ended, wait_for
from support.patience import TIMEOUT_S, patient


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    for app in (households.app, offspring.app):
        app.conf.update(broker_url=redis_url, result_backend=redis_url)


def read_farewells(folder: Path) -> list[list[str]]:
    path = folder / "farewells"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def expected(*pids: int) -> list[list[str]]:
    pairs = ([["signal", str(pid), "0", "MainThread"], ["atexit", str(pid)]] for pid in pids)
    return [each for pair in pairs for each in pair]


@pytest.mark.parametrize("pause_s", [None, 0.0, 0.2])
def test_a_device_of_a_worker_that_ends_says_so_once(
    start_worker: StartWorker, tmp_path: Path, pause_s: float | None
) -> None:
    worker = start_worker("apps.households", "-c", "1")
    (device,) = wait_for(worker.devices, "it has a device")
    if pause_s is not None:
        # After a long one, another thread reads the pipe.
        assert households.pid.delay(pause_s).get(timeout=TIMEOUT_S) == device.pid
    assert worker.stop() == 0, worker.log
    assert read_farewells(tmp_path) == expected(device.pid)
    assert "Traceback" not in worker.log


def test_a_device_that_is_recycled_says_so(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start_worker("apps.households", "-c", "1", env={"BATCHERY_DEVICE_MAX_JOBS": "1"})
    worker.wait_answers(households.app)
    pids = [households.pid.delay(0.1).get(timeout=TIMEOUT_S) for _ in range(3)]
    # One that is due may run one more job before it is told.
    own = dict.fromkeys(pids)
    wait_for(lambda: read_farewells(tmp_path) == expected(*own), "all have said so")
    assert worker.stop() == 0, worker.log
    assert "died" not in worker.log


@pytest.mark.parametrize("farewell", ["raise", "exit", "hang"])
def test_a_receiver_does_not_keep_its_worker(
    start_worker: StartWorker, tmp_path: Path, farewell: str
) -> None:
    worker = start_worker("apps.households", "-c", "1", env={"FAREWELL": farewell})
    (device,) = wait_for(worker.devices, "it has a device")
    assert households.pid.delay(0).get(timeout=TIMEOUT_S) == device.pid
    started_s = time.monotonic()
    assert worker.stop() == 0, worker.log
    assert time.monotonic() - started_s < LEAVE_TIMEOUT_S + patient(30)
    assert has_ended(device.pid)
    notes = expected(device.pid)[: 2 if farewell == "raise" else 1]
    assert read_farewells(tmp_path) == notes
    assert ("no farewell" in worker.log) == (farewell == "raise")


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_the_death_of_a_device_is_noticed_though_its_child_lives(
    start_worker: StartWorker, way: str
) -> None:
    start_worker("apps.households", "-c", "1")
    device, child = households.leave_child.delay(way).get(timeout=TIMEOUT_S)
    try:
        os.kill(device, signal.SIGKILL)
        assert households.pid.delay(0).get(timeout=TIMEOUT_S) != device
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Path]:
    """A book of the children that a test leaves behind; they end with the test."""
    book = tmp_path / "children"
    yield book
    for pid in offspring.pids(book):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("place", ["batch", "ordinary", "import"])
def test_a_killed_worker_leaves_no_device_and_loses_no_job_though_a_child_lives(
    start_worker: StartWorker, tmp_path: Path, children: Path, place: str
) -> None:
    forks = {"FORK_AT_IMPORT": str(children)} if place == "import" else {}
    worker = start_worker("apps.offspring", "-c", "1", env=forks)
    if place != "import":
        offspring.app.tasks[f"apps.offspring.{place}"].delay(str(children)).get(timeout=TIMEOUT_S)
    # At an import, one of the main process and one of the device, which may still start: a worker
    # that has ordinary tasks does not wait for it.
    count = 2 if place == "import" else 1
    wait_for(lambda: len(offspring.pids(children)) == count, "children")
    left = offspring.pids(children)
    places = {name: str(tmp_path / name) for name in ("begun", "gate", "ended")}
    jobs = [offspring.hold.delay(number, **places) for number in range(20)]
    wait_for(lambda: executions(tmp_path / "begun"), "a batch runs")
    family = [each for each in psutil.Process(worker.pid).children() if each.pid not in left]
    assert family
    worker.process.kill()
    worker.wait_exit()
    # Of what was running nothing ends: the gate is still closed.
    wait_ended(family, patient(10))
    (tmp_path / "gate").touch()
    start_worker("apps.offspring", "-c", "1")
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == list(range(20))
    assert sorted(map(int, executions(tmp_path / "ended"))) == list(range(20))
    assert not any(map(has_ended, left))
