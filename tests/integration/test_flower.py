"""A real Flower beside a real worker: what its API tells of batch tasks."""

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from apps import shop
from benchmarks.redis_cluster import find_lasting_port
from conftest import StartWorker
from support.commands import start
from support.harness import Worker, kill_all, wait_for
from support.patience import patient

JOBS = 300


class Flower(NamedTuple):
    """A running Flower, and the worker that it watches."""

    port: int
    worker: Worker

    def ask(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=patient(60)) as answer:
            return json.load(answer)

    def knows_the_worker(self) -> bool:
        """Whether it has had an event of the worker: from then on it misses none."""
        with contextlib.suppress(OSError):
            return self.worker.name in json.dumps(self.ask("/workers?json=1"))
        return False


@pytest.fixture(scope="module")
def flower(redis_url: str, start_module_worker: StartWorker) -> Iterator[Flower]:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_module_worker("apps.shop", "--task-events").wait_answers(shop.app)
    made = Flower(find_lasting_port(), worker)
    options = ["flower", f"--port={made.port}", "--address=127.0.0.1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWER_UNAUTHENTICATED_API", "true")
        process: Any = start(redis_url, "celery", "-A", "apps.shop", *options)
    wait_for(made.knows_the_worker, "Flower knows the worker", patient(60))
    yield made
    kill_all(process)
    process.communicate()


def finished(flower: Flower, ids: set[str]) -> dict[str, Any]:
    """The run's tasks, once Flower knows how each of them ended."""
    listed = {
        task_id: task
        for task_id, task in flower.ask("/api/tasks?limit=10000").items()
        if task_id in ids
    }
    ended = [task for task in listed.values() if task["state"] in ("SUCCESS", "FAILURE")]
    return listed if len(ended) == len(ids) else {}


def test_flower_lists_every_job_of_a_run_with_state_worker_and_run_time(flower: Flower) -> None:
    jobs = shop.shout.submit_many([f"text {number}" for number in range(JOBS)])
    jobs.get(timeout=patient(60))
    ids = {job.id for job in jobs.results or ()}
    listed = wait_for(lambda: finished(flower, ids), "every job in Flower")
    assert len(listed) == JOBS
    for task in listed.values():
        assert task["name"] == "apps.shop.shout"
        assert task["state"] == "SUCCESS"
        assert task["worker"] == flower.worker.name
        assert task["runtime"] >= 0
        assert task["started"] >= task["received"]


def test_flower_shows_which_job_of_a_batch_failed_and_why(flower: Flower) -> None:
    jobs = [shop.nasty.delay(text) for text in ("a", "raise", "b")]
    listed = wait_for(lambda: finished(flower, {job.id for job in jobs}), "every job in Flower")
    states = [listed[job.id]["state"] for job in jobs]
    assert states == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert "a bad one" in listed[jobs[1].id]["exception"]
    assert "in nasty" in listed[jobs[1].id]["traceback"]
