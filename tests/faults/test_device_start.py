"""Kills device processes while they load their model, before the worker is ready."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from apps import slow_start
from batchery_worker.devstack.stack import READY, WORKER
from conftest import StartWorker
from support.harness import PYTHONPATH, Worker, kill_all, wait_for
from support.patience import TIMEOUT_S
from support.redis_places import with_password


@pytest.fixture(params=[{}, {"ORDINARY": "1"}], ids=["models", "models and ordinary tasks"])
def worker(start_worker: StartWorker, tmp_path: Path, request: pytest.FixtureRequest) -> Worker:
    env = {"GATE_FOLDER": str(tmp_path), **request.param}
    return start_worker("apps.slow_start", "-c", "1", ready=False, env=env)


@pytest.fixture
def kill(tmp_path: Path) -> Callable[[int], None]:
    """Kills the process that loads the model as number so and so."""

    def loading() -> list[str]:
        path = tmp_path / "loading"
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    def kill_one(number: int) -> None:
        wait_for(
            lambda: len(found := loading()) > number and found[number].endswith("\n"),
            f"process {number} loads the model",
            TIMEOUT_S,
        )
        os.kill(int(loading()[number]), signal.SIGKILL)

    return kill_one


def test_device_that_is_killed_while_it_starts_is_started_again(
    worker: Worker, kill: Callable[[int], None], redis_url: str, tmp_path: Path
) -> None:
    kill(0)
    (tmp_path / "gate").touch()
    worker.wait_ready()
    slow_start.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    job = slow_start.app.tasks["slow"].delay("item")
    assert job.get(timeout=TIMEOUT_S) == worker.devices()[0].pid


def test_device_that_dies_at_each_start_ends_the_worker(
    worker: Worker, kill: Callable[[int], None]
) -> None:
    kill(0)
    kill(1)
    assert worker.wait_exit() == 2
    assert "died while it started, 2 times" in worker.log


@pytest.mark.parametrize("env", [{}, {"ORDINARY": "1"}], ids=["models", "models and others"])
def test_model_that_takes_too_long_ends_the_worker(
    start_worker: StartWorker, tmp_path: Path, env: dict[str, str]
) -> None:
    env = {"GATE_FOLDER": str(tmp_path), "BATCHERY_DEVICE_START_TIMEOUT_S": "3", **env}
    worker = start_worker("apps.slow_start", "-c", "1", ready=False, env=env)
    assert worker.wait_exit() == 2
    (why,) = [line for line in worker.log.splitlines() if "CRITICAL" in line]
    assert "not ready after" in why
    assert "cpu (slow)" in why


@pytest.mark.parametrize(
    ("options", "env"), [((), {"ORDINARY": "1"}), (("-B",), {})], ids=["ordinary tasks", "beat"]
)
def test_all_but_models_need_not_wait_for_models(
    start_worker: StartWorker,
    tmp_path: Path,
    redis_url: str,
    options: tuple[str, ...],
    env: dict[str, str],
) -> None:
    env = {"GATE_FOLDER": str(tmp_path), **env}
    arguments = ("-c", "1", "-l", "WARNING", *options)
    worker = start_worker("apps.slow_start", *arguments, ready=False, env=env)
    app = slow_start.app
    app.conf.update(broker_url=redis_url, result_backend=redis_url)
    job = app.tasks["slow"].delay("item")
    if env.get("ORDINARY"):
        assert app.send_task("plain").get(timeout=TIMEOUT_S) == "done"
    worker.wait_answers(app)
    wait_for((tmp_path / "loading").exists, "the model is being loaded", TIMEOUT_S)
    assert not job.ready()
    # At Celery's default level people see what it waits for.
    assert worker.log.count("loading slow on cpu; their jobs wait") == 1
    assert "models are ready" not in worker.log
    (tmp_path / "gate").touch()
    assert job.get(timeout=TIMEOUT_S) == worker.devices()[0].pid
    assert worker.stop() == 0
    # Said once the jobs are on their way.
    assert worker.log.count("models are ready after ") == 1


def test_worker_of_up_is_ready_with_its_models(tmp_path: Path, redis_url: str) -> None:
    env = {"GATE_FOLDER": str(tmp_path), "ORDINARY": "1", "PYTHONPATH": PYTHONPATH}
    env |= {"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url}
    command = [sys.executable, "-m", WORKER, "-A", "apps.slow_start", "worker", "-c", "1"]
    said = tmp_path / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        app = slow_start.app
        app.conf.update(broker_url=redis_url, result_backend=redis_url)
        assert app.send_task("plain").get(timeout=TIMEOUT_S) == "done"
        assert READY not in said.read_text()
        (tmp_path / "gate").touch()
        wait_for(lambda: READY in said.read_text(), "it is ready", TIMEOUT_S)
    finally:
        kill_all(process)


def test_wrong_password_is_logged_before_models_are_loaded(
    start_worker: StartWorker, tmp_path: Path, redis_url: str
) -> None:
    env = {"GATE_FOLDER": str(tmp_path), "CELERY_BROKER_URL": with_password(redis_url, "wrong")}
    worker = start_worker("apps.slow_start", ready=False, env=env)
    wait_for((tmp_path / "loading").exists, "the model is being loaded", TIMEOUT_S)
    assert "check user and password" in worker.log
    assert "The worker loads its models, then it tries again" in worker.log
    assert "wrong@" not in worker.log


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ('kind = "embeding"\nmodel = "there"', "setting models.embed.kind = 'embeding'"),
        ('kind = "embedding"\nmodel = "./nowhere"', "model './nowhere'"),
    ],
)
def test_why_a_worker_does_not_start_is_logged_once(
    start_worker: StartWorker, tmp_path: Path, model: str, problem: str
) -> None:
    (tmp_path / "batchery.toml").write_text(f"[models.embed]\n{model}\n")
    worker = start_worker("apps.shop", ready=False, cwd=tmp_path)
    assert worker.wait_exit() == 2
    assert worker.log.count(problem) == 1, worker.log
    assert "CRITICAL" in worker.log
