"""Reloads while jobs come all the time, and devices that die in the midst of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from apps import reloaded
from batchery.cli.control import reload
from batchery.cli.explain import explain
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S, patient
from support.steady_callers import SteadyCallers

#: How often the model is replaced under load.
RELOADS = 10


@pytest.fixture(autouse=True)
def _app(redis_url: str, tmp_path: Path) -> None:
    reloaded.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    (tmp_path / "version").write_text("v0")


def start(start_worker: StartWorker, folder: Path, devices: str = "cpu") -> Worker:
    env = {"RELOADED": str(folder), "BATCHERY_DEVICES": devices}
    worker = start_worker("apps.reloaded", "-c", "1", "-Q", "text,celery", env=env)
    return worker.wait_known(str(reloaded.app.conf.broker_url))


def run(command: Any, *arguments: str) -> Result:
    options = ["-A", "apps.reloaded", "--timeout", str(patient(1))]
    return CliRunner().invoke(command, [*arguments, *options])


def call() -> list[str]:
    jobs = [reloaded.text.delay(number, pause_s=0.005) for number in range(4)]
    return [job.get(timeout=TIMEOUT_S) for job in jobs]


def test_versions_of_two_devices_under_load(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = start(start_worker, tmp_path, "cpu:0,cpu:1")
    with SteadyCallers(call) as callers:
        for number in range(1, RELOADS + 1):
            (tmp_path / "version").write_text(f"v{number}")
            done = run(reload, "text")
            assert done.exit_code == 0, done.output
            callers.wait_more(4)
            lines = done.output.splitlines()
            told = f"text is version v{number}, before it was v{number - 1}, "
            assert [told in each for each in lines] == [True, True], lines
            jobs = [reloaded.text.delay(n) for n in range(3)]
            assert {job.get(timeout=TIMEOUT_S) for job in jobs} == {f"v{number}"}
        assert f"version v{RELOADS}" in run(explain, jobs[0].id).output
    assert len(callers.answers) > 4 * RELOADS
    assert set(callers.answers) <= {f"v{number}" for number in range(RELOADS + 1)}
    assert "died" not in worker.log


def test_a_version_that_does_not_load_changes_nothing(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    start(start_worker, tmp_path, "cpu:0,cpu:1")
    (tmp_path / "version").write_text("broken")
    with SteadyCallers(call) as callers:
        done = run(reload, "text")
    assert done.exit_code == 1
    first, second = done.output.splitlines()
    assert first.endswith("cpu:0: not reloaded, text goes on as before: the text is broken")
    assert second.endswith("text goes on as before: not tried, as another device failed")
    assert set(callers.answers) == {"v0"}
    done = run(reload, "unknown")
    assert (done.exit_code, "no worker serves a model 'unknown'" in done.output) == (1, True)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_process_that_is_killed_while_another_loads(
    start_worker: StartWorker, tmp_path: Path, is_fresh: bool
) -> None:
    worker = start(start_worker, tmp_path)
    (old,) = worker.devices()
    (tmp_path / "version").write_text("v1")
    (tmp_path / "gate").touch()
    with SteadyCallers(call) as callers, ThreadPoolExecutor(1) as pool:
        callers.wait_more(1)
        ordered = pool.submit(run, reload, "text")
        wait_for((tmp_path / "loading").exists, "the new version is being loaded", TIMEOUT_S)
        (fresh,) = [each for each in worker.devices() if each.pid != old.pid]
        (fresh if is_fresh else old).kill()
        (tmp_path / "gate").unlink()
        done = ordered.result(TIMEOUT_S)
        if is_fresh:
            assert done.exit_code == 1
            assert (
                "goes on as before: device process for cpu died: killed by signal 9" in done.output
            )
            assert set(callers.answers) == {"v0"}
            assert run(reload, "text").exit_code == 0
        else:
            assert done.exit_code == 0, done.output
        callers.wait_more()
    assert set(callers.answers) == {"v0", "v1"}


def test_workers_that_cannot_answer_hold_nothing_up(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker, killed = start(start_worker, tmp_path), start(start_worker, tmp_path)
    (tmp_path / "version").write_text("v1")
    done = run(reload, "text")
    assert (done.exit_code, len(done.output.splitlines())) == (0, 2), done.output
    # One that nobody knows to be dead yet.
    killed.kill()
    done = run(reload, "text")
    assert (done.exit_code, done.output.split(" ")[0]) == (0, worker.name), done.output
    assert len(done.output.splitlines()) == 1
    done = run(reload, "text", "--worker", "nobody@here")
    assert "no worker 'nobody@here' with devices answers" in str(done.exception)
