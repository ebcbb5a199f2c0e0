"""A worker of an app with batch tasks, but without `install(app)`."""

from celery import Celery

from apps import uninstalled
from conftest import StartWorker
from support.harness import wait_for
from support.patience import patient

TIMEOUT_S = patient(30)


def test_worker_without_install_answers_one_by_one_and_says_so(
    start_worker: StartWorker, redis_url: str
) -> None:
    worker = start_worker("apps.uninstalled", "-P", "solo")
    wait_for(lambda: "call batchery.install(app) where the app is made" in worker.log, "a word")
    assert f"{uninstalled.shout.name}: runs one by one" in worker.log
    with Celery("caller", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        jobs = [app.send_task(uninstalled.shout.name, [text]) for text in ("a", "b")]
        assert [job.get(timeout=TIMEOUT_S) for job in jobs] == ["A of 1", "B of 1"]
