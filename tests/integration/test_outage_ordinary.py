"""Ordinary tasks while their result backend is away: no worse than in stock Celery."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from conftest import StartWorker
from support.harness import Worker, unsettled, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = patient(60)

POOLS = pytest.mark.parametrize("pool", ["prefork", "threads"])


@pytest.fixture
def start(start_worker: StartWorker, own_redis: OwnRedis) -> Any:
    """Starts a worker whose results are elsewhere than its broker."""

    def start(pool: str, **env: str) -> Worker:
        env["CELERY_RESULT_BACKEND"] = own_redis.url
        return start_worker("apps.severed", "-P", pool, "-c", "1", env=env)

    return start


def send(redis_url: str, task: str, argument: Path) -> str:
    with Celery("sender", broker=redis_url, set_as_current=False) as app:
        return str(app.send_task(f"apps.severed.{task}", [str(argument)]).id)


def read_meta(own_redis: OwnRedis, job: str) -> Any:
    with Celery("reader", backend=own_redis.url, set_as_current=False) as app:
        return app.backend.get_task_meta(job)


@POOLS
def test_an_acknowledged_job_whose_result_finds_no_backend_fails(
    start: Any, own_redis: OwnRedis, redis_url: str, tmp_path: Path, pool: str
) -> None:
    worker = start(pool, WAIT_S=str(patient(3)))
    job = send(redis_url, "early", tmp_path / "gate")
    wait_for((tmp_path / "gate.begun").exists, "it runs")
    own_redis.kill()
    (tmp_path / "gate").touch()
    # Its result has waited for long enough; its failure waits once more.
    wait_for((tmp_path / "internal-error").exists, "the app is told", TIMEOUT_S)
    own_redis.start()
    wait_for(lambda: read_meta(own_redis, job)["status"] == "FAILURE", "a failure", TIMEOUT_S)
    wait_for(lambda: f"[{job}] raised unexpected: " in worker.log, "it is logged", TIMEOUT_S)


@POOLS
def test_a_job_that_can_come_again_does(
    start: Any, own_redis: OwnRedis, redis_url: str, tmp_path: Path, pool: str
) -> None:
    worker = start(pool, WAIT_S="0.5")
    job = send(redis_url, "late", tmp_path / "gate")
    wait_for((tmp_path / "gate.begun").exists, "it runs")
    own_redis.kill()
    (tmp_path / "gate").touch()
    wait_for(lambda: worker.log.count(f"[{job}] received") > 1, "it has come again", TIMEOUT_S)
    own_redis.start()
    wait_for(lambda: read_meta(own_redis, job)["status"] == "SUCCESS", "its result", TIMEOUT_S)
    wait_for(lambda: unsettled(redis_url) == 0, "it is acknowledged")


@POOLS
def test_a_task_that_reads_a_state_is_told_at_once_that_its_backend_is_away(
    start: Any, own_redis: OwnRedis, redis_url: str, tmp_path: Path, pool: str
) -> None:
    start(pool)
    own_redis.kill()
    book = tmp_path / "book"
    job = send(redis_url, "read_state", book)
    wait_for(lambda: book.exists() and book.read_text(), "it is told", TIMEOUT_S)
    error, took_s = book.read_text().split()
    assert (error, float(took_s) < patient(5)) == ("ConnectionError", True)
    own_redis.start()
    # Its own result waits for the backend all the same.
    wait_for(lambda: read_meta(own_redis, job)["result"] == [error], "its result", TIMEOUT_S)
