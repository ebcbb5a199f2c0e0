"""A real Flower beside a real worker: what its API tells of batch tasks."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from apps import shop
from batchery_worker.devstack.stack import Stack
from support.harness import PYTHONPATH, wait_for
from support.patience import patient

JOBS = 300


@pytest.fixture(scope="module")
def stack(redis_url: str) -> Iterator[Stack]:
    stack = Stack("apps.shop", redis_url=redis_url, flower_port=0)
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("PYTHONWARNINGS", "ignore")
        with stack:
            # Once it has had an event of the worker, it misses none.
            wait_for(lambda: stack.worker_name in json.dumps(ask(stack, "/workers?json=1")), "it")
            yield stack


def ask(stack: Stack, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.flower_url}{path}", timeout=patient(60)) as answer:
        said: dict[str, Any] = json.load(answer)
    return said


def finished(stack: Stack, ids: set[str]) -> dict[str, Any]:
    """The run's tasks, once Flower knows how each of them ended."""
    listed = {
        task_id: task
        for task_id, task in ask(stack, "/api/tasks?limit=10000").items()
        if task_id in ids
    }
    ended = [task for task in listed.values() if task["state"] in ("SUCCESS", "FAILURE")]
    return listed if len(ended) == len(ids) else {}


def test_flower_lists_every_job_of_a_run_with_state_worker_and_run_time(stack: Stack) -> None:
    jobs = shop.shout.submit_many([f"text {number}" for number in range(JOBS)])
    jobs.get(timeout=patient(60))
    ids = {job.id for job in jobs.results or ()}
    listed = wait_for(lambda: finished(stack, ids), "every job in Flower")
    assert len(listed) == JOBS
    for task in listed.values():
        assert task["name"] == "apps.shop.shout"
        assert task["state"] == "SUCCESS"
        assert task["worker"] == stack.worker_name
        assert task["runtime"] >= 0
        assert task["started"] >= task["received"]


def test_flower_shows_which_job_of_a_batch_failed_and_why(stack: Stack) -> None:
    jobs = [shop.nasty.delay(text) for text in ("a", "raise", "b")]
    listed = wait_for(lambda: finished(stack, {job.id for job in jobs}), "every job in Flower")
    states = [listed[job.id]["state"] for job in jobs]
    assert states == ["SUCCESS", "FAILURE", "SUCCESS"]
    assert "a bad one" in listed[jobs[1].id]["exception"]
    assert "in nasty" in listed[jobs[1].id]["traceback"]
