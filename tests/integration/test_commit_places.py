"""Where the broker is, and where the results are: all of it is committed."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.own_redis import OwnRedis
from support.patience import patient
from support.redis_places import with_database

TIMEOUT_S = patient(30)


@contextlib.contextmanager
def client(broker: str, results: str) -> Iterator[Celery]:
    app = Celery("stranger", broker=broker, backend=results, set_as_current=False)
    try:
        yield app
    finally:
        backend: Any = app.backend
        backend.result_consumer.stop()
        app.close()


def has_leases(url: str) -> bool:
    with open_redis(url) as redis:
        return bool(list(redis.scan_iter("batchery:lease:*")))


def stored(url: str, job_id: str) -> Any:
    with open_redis(url) as redis:
        return redis.get(f"celery-task-meta-{job_id}")


def committed(worker: Worker, app: Celery) -> int:
    return int(worker.inspect(app, "stats")["pool"]["batches"]["committed_jobs"])


def test_two_databases_of_one_server_are_one_step(
    start_worker: StartWorker, redis_url: str
) -> None:
    broker = with_database(redis_url, 3)
    worker = start_worker("apps.commits", env={"CELERY_BROKER_URL": broker})
    with client(broker, redis_url) as app:
        jobs: list[Any] = [app.send_task("apps.commits.shout", ("hi",)) for _ in range(3)]
        assert {job.get(timeout=TIMEOUT_S)[:2] for job in jobs} == {"HI"}
        wait_for(lambda: committed(worker, app) == 3, "all are committed")
        wait_for(lambda: not has_leases(broker), "no lease is left")
        assert worker.stop() == 0


def test_with_two_servers_results_are_stored_first_and_acknowledged_then(
    start_worker: StartWorker, redis_url: str, own_redis: OwnRedis, tmp_path: Path
) -> None:
    worker = start_worker("apps.commits", env={"CELERY_RESULT_BACKEND": own_redis.url})
    with client(redis_url, own_redis.url) as app:
        jobs: list[Any] = [app.send_task("apps.commits.shout", ("far",)) for _ in range(3)]
        link = app.signature("apps.commits.remember", (str(tmp_path / "linked"),))
        linked: Any = app.send_task("apps.commits.shout", ("link",), link=link)
        bad: Any = app.send_task("apps.commits.shout", ("bad",))
        assert {job.get(timeout=TIMEOUT_S)[:3] for job in jobs} == {"FAR"}
        assert linked.get(timeout=TIMEOUT_S)[:4] == "LINK"
        assert "LookupError" in repr(bad.get(timeout=TIMEOUT_S, propagate=False))
        wait_for((tmp_path / "linked").exists, "the callback has run")
        wait_for(lambda: not has_leases(redis_url), "no lease is left")
        wait_for(lambda: committed(worker, app) == 3, "all are committed")
        assert worker.stop() == 0


def test_a_time_limit_does_not_count_while_results_wait_for_redis(
    start_worker: StartWorker, own_redis: OwnRedis, tmp_path: Path
) -> None:
    worker = start_worker(
        "apps.commits",
        env={"CELERY_BROKER_URL": own_redis.url, "CELERY_RESULT_BACKEND": own_redis.url},
    )
    (device,) = worker.devices()
    path = tmp_path / "job"
    with client(own_redis.url, own_redis.url) as app:
        job: Any = app.send_task("apps.commits.hurry_at", (str(path),))
        wait_for(path.exists, "the job runs")
        own_redis.kill()
        Path(f"{path}.go").touch()
        wait_for(lambda: "results wait for Redis" in worker.log, "the result waits")
        time.sleep(5.5)  # Longer than the limit.
        own_redis.start()
        wait_for(lambda: stored(own_redis.url, job.id), "the result is stored")
        assert job.get(timeout=TIMEOUT_S) == str(path)
    assert path.read_text() == "x", worker.log
    assert device.is_running()
