"""Redis and workers killed by kill -9, and started again: the jobs are still answered."""

import json
from functools import partial
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import open_redis, queue_length, unsettled, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S


def send(url: str, task: str, items: list[Any], **keywords: Any) -> list[str]:
    """Submits jobs to their task's own queue, and listens to nothing; returns their ids."""
    name = f"apps.stages.{task}"
    with Celery("sender", broker=url, set_as_current=False) as app:
        return [app.send_task(name, [item], keywords, queue=name).id for item in items]


def results(url: str, ids: list[str]) -> list[Any]:
    """The results that are stored, in order."""
    with open_redis(url) as redis:
        found: Any = redis.mget([f"celery-task-meta-{each}" for each in ids])
    return [json.loads(each)["result"] for each in found if each]


def has_results(url: str, ids: list[str], count: int) -> bool:
    return len(results(url, ids)) >= count


def test_a_worker_goes_on_after_a_restart_of_redis(
    start_worker: StartWorker, own_redis: OwnRedis
) -> None:
    url = own_redis.url
    env = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
    worker = start_worker("apps.stages", env=env)
    devices = worker.devices()
    jobs: list[str] = []
    for restarts in range(1, 3):
        latest = send(url, "served_by", list(range(500)), pause_s=0.05)
        wait_for(partial(has_results, url, latest, 100), "jobs are done")
        jobs += latest
        own_redis.kill()
        # Long enough that the worker finds nobody to give its jobs back to.
        wait_for(partial(worker.has_logged, "Connection to broker lost", restarts), "it knows")
        own_redis.start()
        wait_for(partial(worker.has_logged, "Connected to redis", restarts + 1), "it is back")
    wait_for(lambda: len(results(url, jobs)) == len(jobs), "all are answered", TIMEOUT_S)
    wait_for(lambda: unsettled(url) == 0, "all is acknowledged")
    assert queue_length(url) == 0
    assert worker.devices() == devices
