"""The standalone app in a fresh process."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from celery import Celery

from conftest import StartWorker
from support.harness import wait_for
from support.patience import patient
from support.redis_places import with_password


def only(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment with these settings alone."""
    ours = ("BATCHERY_", "CELERY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, **variables}


def run(directory: Path, script: str, **variables: str) -> str:
    """Runs Python code with these settings alone; returns what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        cwd=directory,
        env=only(variables),
        stdout=subprocess.PIPE,
        text=True,
    )
    return ended.stdout


def complaint(directory: Path, *command: str, **variables: str) -> str:
    """The last line of a `celery` command that ends with exit code 2, and its only one of ours."""
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("celery")), "-A", "batchery.app", *command],
        check=False,
        cwd=directory,
        env=only({"PYTHONWARNINGS": "ignore", **variables}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=patient(90),
    )
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    return line


def test_standalone_app_reads_no_setting_when_it_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys, batchery.app\n"
        "from batchery.errors import SettingsError\n"
        "assert 'torch' not in sys.modules\n"
        "try: batchery.app.app.conf.broker_url\n"
        "except SettingsError as error: assert 'BATCHERY_TYPO' in str(error)\n"
        "else: sys.exit('the broken variable went unnoticed')\n"
    )
    (tmp_path / "batchery.toml").write_text("broken")
    run(tmp_path, script, BATCHERY_TYPO="1")


def test_standalone_app_takes_its_redis_from_the_settings(tmp_path: Path) -> None:
    script = (
        "from batchery.app import app\n"
        "print(app.conf.broker_url, app.conf.result_backend, app.conf.result_expires)"
    )
    settings = {"BATCHERY_REDIS_URL": "redis://one:1/2", "BATCHERY_RESULT_EXPIRES_S": "60"}
    said = run(tmp_path, script, **settings)
    assert said.split() == ["redis://one:1/2", "redis://one:1/2", "60"]


def test_standalone_app_never_gives_up_its_broker(tmp_path: Path) -> None:
    script = "from batchery.app import app; print(app.conf.broker_connection_max_retries)"
    assert run(tmp_path, script).strip() == "None"


def test_wrong_password_is_one_line_that_says_what_to_set(
    start_worker: StartWorker, tmp_path: Path, model_toml: str, redis_url: str
) -> None:
    (tmp_path / "batchery.toml").write_text(model_toml)
    url = with_password(redis_url, "wrong")
    urls = ("BATCHERY_REDIS_URL", "CELERY_BROKER_URL", "CELERY_RESULT_BACKEND")
    worker = start_worker("batchery.app", ready=False, env=dict.fromkeys(urls, url))
    wait_for(
        lambda: worker.has_logged("for batchery.app in BATCHERY_REDIS_URL", 1),
        "it says",
        patient(90),
    )
    assert "wrong@" not in worker.log


@pytest.mark.parametrize("command", [["worker"], ["inspect", "ping"], ["flower"]])
def test_wrong_setting_ends_a_celery_command_with_one_line(
    tmp_path: Path, command: list[str]
) -> None:
    line = complaint(tmp_path, *command, BATCHERY_REDIS_URL="localhost:6379")
    assert line.startswith("Error: setting redis_url = 'localhost:6379' (from environment variable")
    line = complaint(tmp_path, *command, BATCHERY_MAX_BATCHSIZE="1")
    assert "BATCHERY_MAX_BATCHSIZE: no such setting, the nearest is BATCHERY_MAX_BATCH_SIZE" in line
    (tmp_path / "batchery.toml").mkdir()
    assert complaint(tmp_path, *command).startswith("Error: batchery.toml: there is no such file; ")


def test_worker_without_models_does_not_start(tmp_path: Path) -> None:
    assert f"no model is configured: {tmp_path}/batchery.toml does not exist; " in complaint(
        tmp_path, "worker", "-Q", "embed"
    )
    (tmp_path / "batchery.toml").touch()
    line = complaint(tmp_path, "worker")
    assert "batchery.toml has no [models.NAME]; " in line
    assert "BATCHERY_SETTINGS_FILE" in line


def test_queue_without_a_task_is_warned_of(
    start_worker: StartWorker, tmp_path: Path, model_toml: str
) -> None:
    (tmp_path / "other.toml").write_text(model_toml)
    env = {"BATCHERY_SETTINGS_FILE": "other.toml"}
    worker = start_worker("batchery.app", "-Q", "embde", env=env)
    assert worker.has_logged("queue 'embde' of -Q: no task of this worker is routed to it,", 1)
    assert worker.devices() == []


def test_worker_of_an_app_logs_the_file_of_settings_or_that_there_is_none(
    start_worker: StartWorker, tmp_path: Path, client: Celery
) -> None:
    worker = start_worker("apps.shop", "-Q", "embed")
    assert f"file of settings: there is no {tmp_path}/batchery.toml" in worker.log
    client.send_task("embed", ["a text"], queue="embed")
    told = f"'embed'; if it is a model of the settings, there is no {tmp_path}/batchery.toml"
    wait_for(lambda: worker.has_logged(told, 1), "the job is refused")
    assert worker.stop() == 0
    (tmp_path / "batchery.toml").write_text("max_batch_size = 4")
    worker = start_worker("apps.shop", "-Q", "embed")
    assert f"file of settings: {tmp_path}/batchery.toml" in worker.log


def test_a_worker_with_a_model_starts_without_a_line_of_other_libraries(
    start_worker: StartWorker, client: Celery, minilm_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "batchery.toml").write_text(
        f'[models.embed]\nkind = "embedding"\nmodel = "{minilm_path}"\n'
    )
    # The default level: the last one counts.
    worker = start_worker("batchery.app", "-l", "WARNING", ready=False)
    client.send_task("embed", ("a text",), queue="embed").get(timeout=patient(120))
    _, _, log = worker.log.partition("[queues]")
    # What is indented belongs to Celery's banner.
    loading, ready = (line for line in log.splitlines() if line and not line.startswith(" "))
    assert "loading embed on" in loading
    assert "models are ready after" in ready


def test_an_engine_starts_without_a_line_of_other_libraries(
    minilm_path: Path, tmp_path: Path
) -> None:
    script = (
        "from batchery import Engine, ModelSettings\n"
        f"model = ModelSettings(kind='embedding', model={str(minilm_path)!r})\n"
        "with Engine(model) as engine: print(len(engine.call('a text')))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        cwd=tmp_path,
        env=only({}),
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
