"""Where the broker is, and where the results are: all of it is committed."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import open_redis, unsettled, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = patient(30)

#: Hard limit of a job, in seconds: a stall does not reach it, an outage does.
LIMIT_S = int(patient(5))


@contextlib.contextmanager
def client(broker: str, results: str) -> Iterator[Celery]:
    app = Celery("stranger", broker=broker, backend=results, set_as_current=False)
    try:
        yield app
    finally:
        backend: Any = app.backend
        backend.result_consumer.stop()
        app.close()


def stored(url: str, job_id: str) -> Any:
    with open_redis(url) as redis:
        return redis.get(f"celery-task-meta-{job_id}")


def test_callbacks_and_failures_where_results_are_on_another_server(
    start_worker: StartWorker, redis_url: str, own_redis: OwnRedis, tmp_path: Path
) -> None:
    start_worker("apps.commits", env={"CELERY_RESULT_BACKEND": own_redis.url})
    with client(redis_url, own_redis.url) as app:
        link = app.signature("apps.commits.remember", (str(tmp_path / "linked"),))
        linked: Any = app.send_task("apps.commits.shout", ("link",), link=link)
        bad: Any = app.send_task("apps.commits.shout", ("bad",))
        assert linked.get(timeout=TIMEOUT_S)[:4] == "LINK"
        assert "LookupError" in repr(bad.get(timeout=TIMEOUT_S, propagate=False))
        wait_for((tmp_path / "linked").exists, "the callback has run")
        wait_for(lambda: unsettled(redis_url) == 0, "no lease is left")


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
        job: Any = app.send_task("apps.commits.wait_at", (str(path),), time_limit=LIMIT_S)
        wait_for(path.exists, "the job runs")
        own_redis.kill()
        Path(f"{path}.go").touch()
        wait_for(lambda: "results wait for Redis" in worker.log, "the result waits")
        time.sleep(LIMIT_S + 0.5)
        own_redis.start()
        wait_for(lambda: stored(own_redis.url, job.id), "the result is stored")
        assert job.get(timeout=TIMEOUT_S) == str(path)
    assert path.read_text() == "x", worker.log
    assert device.is_running()
