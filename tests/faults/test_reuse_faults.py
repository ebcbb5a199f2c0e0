"""Equal items when workers die, come back, or compute something else than before."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from conftest import StartWorker
from support.cached_jobs import answers, computed, send
from support.harness import queue_length, unsettled, wait_for


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "computed"
    path.touch()
    return path


def test_equal_jobs_of_a_killed_worker_end_once_on_another_worker(
    start_worker: StartWorker, client: Celery, log: Path, tmp_path: Path, redis_url: str, store: Any
) -> None:
    gate = tmp_path / "gate"
    worker = start_worker("apps.cached")
    (first,) = send(client, "shout", "a", path=str(log), gate=str(gate))
    wait_for(lambda: computed(log)["a"], "it runs")
    duplicates = send(client, "shout", *"ab" * 20, path=str(log), gate=str(gate))
    # Some of them are in the worker, the others behind it in the queue; some on their way there.
    wait_for(lambda: unsettled(redis_url) + queue_length(redis_url) == 41, "none is missing")
    worker.kill()
    start_worker("apps.cached")
    wait_for(lambda: computed(log)["a"] == 2, "another one has it")
    gate.touch()
    assert answers([first, *duplicates]) == ["A", *"AB" * 20]
    assert computed(log) == {"a": 2, "b": 1}
    wait_for(lambda: unsettled(redis_url) == 0, "all are acknowledged")
    assert queue_length(redis_url) == 0
    # Whoever computed it first: there is one result for each, and nothing was left behind.
    assert len(store.keys("celery-task-meta-*")) == 41


def test_versions_of_a_task_share_no_cached_results(
    start_worker: StartWorker, client: Celery, log: Path, redis_url: str
) -> None:
    # Each is another process: what is finished is shared by all workers.
    for version, times in (("1", 1), ("2", 2), ("1", 2)):
        worker = start_worker("apps.cached", env={"VERSION": version})
        found = answers(send(client, "versioned", "a", "a", path=str(log)))
        assert found == [f"a {version}"] * 2
        assert computed(log) == {"a": times}
        wait_for(lambda: unsettled(redis_url) == 0, "all are acknowledged")
        worker.kill()
