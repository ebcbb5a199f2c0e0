"""Redis and workers killed by kill -9, and started again: the jobs are still answered."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import Worker, ask, open_redis, queue_length, unsettled, wait_ended, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = patient(60)


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


def held(broker: str, worker: Worker) -> int | None:
    """Jobs that the worker has and has not settled; None while it is reconnecting."""
    with Celery("looker", broker=broker, set_as_current=False) as app:
        answers = [ask(app, command, [worker.name]) for command in ("active", "reserved")]
    if not all(answers):
        return None
    return len({each["id"] for answer in answers for each in answer[worker.name]})


def test_jobs_of_a_killed_worker_are_redelivered(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = start_worker("apps.stages")
    jobs = send(redis_url, "gated", [0], gate=str(gate))
    wait_for((tmp_path / "gate.begun").exists, "a job runs")
    jobs += send(redis_url, "served_by", list(range(20)))
    # The others are in this worker, or behind it in the queue.
    wait_for(lambda: held(redis_url, first), "the worker holds it")
    # One that it takes between the two looks is in neither.
    wait_for(lambda: unsettled(redis_url) + queue_length(redis_url) == 21, "none is missing")
    devices = first.devices()
    first.process.kill()
    first.wait_exit()
    wait_ended(devices, TIMEOUT_S)
    gate.touch()
    second = start_worker("apps.stages")
    wait_for(lambda: len(results(redis_url, jobs)) == 21, "all jobs are answered", TIMEOUT_S)
    assert set(results(redis_url, jobs)) == {second.devices()[0].pid}
    wait_for(lambda: unsettled(redis_url) == 0, "all is acknowledged")


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


def test_results_wait_for_a_backend_that_is_away(
    start_worker: StartWorker, own_redis: OwnRedis, redis_url: str
) -> None:
    worker = start_worker("apps.stages", env={"CELERY_RESULT_BACKEND": own_redis.url})
    own_redis.kill()
    jobs = send(redis_url, "lengths", ["x" * number for number in range(100)])
    # In the device, or on the threads of the main process: wherever they would be stored.
    says = ("results wait for Redis", "a job's completion waits")
    wait_for(lambda: any(text in worker.log for text in says), "results wait")
    # The main process does not wait with them: it answers.
    wait_for(lambda: held(redis_url, worker), "the worker says what it holds")
    wait_for(lambda: unsettled(redis_url) + queue_length(redis_url) == 100, "none is missing")
    own_redis.start()
    wait_for(lambda: len(results(own_redis.url, jobs)) == 100, "all results", TIMEOUT_S)
    assert results(own_redis.url, jobs) == list(range(100))
    wait_for(lambda: unsettled(redis_url) == 0, "all is acknowledged")
    assert queue_length(redis_url) == 0
