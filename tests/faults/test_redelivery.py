"""A job that goes back to its queue says so when it comes again, as with kombu's own transport."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from conftest import StartWorker
from support.harness import wait_for
from support.patience import TIMEOUT_S


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Each execution of a job is a line of it."""
    return tmp_path / "book"


@pytest.fixture
def client(redis_url: str) -> Any:
    with Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        yield app


def send(client: Celery, task: str, *items: Any, **keywords: Any) -> list[Any]:
    name = f"apps.redelivery.{task}"
    keywords = {key: str(value) for key, value in keywords.items()}
    return [client.send_task(name, [item], keywords) for item in items]


def test_job_rejected_with_requeue_is_marked_when_it_comes_again(
    start_worker: StartWorker, client: Celery, book: Path
) -> None:
    start_worker("apps.redelivery", "-c", "2")
    jobs = send(client, "batch", 1, 2, 3, book=book)
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == [[True, True]] * 3
    assert sorted(book.read_text().split()) == ["1", "1", "2", "2", "3", "3"]


def test_job_of_killed_worker_is_marked_when_another_one_runs_it(
    start_worker: StartWorker, client: Celery, book: Path, tmp_path: Path, store: Any
) -> None:
    first = start_worker("apps.redelivery", "-c", "1")
    (job,) = send(client, "held", 1, book=book, gate=tmp_path / "gate")
    wait_for(lambda: book.exists() and book.read_text() == "1\n", "the job runs")
    # Its first heartbeat registers its name.
    wait_for(lambda: first.name in str(store.hgetall("batchery:worker-info")), "its name is known")
    first.kill()
    (tmp_path / "gate").touch()
    second = start_worker("apps.redelivery", "-c", "1")
    assert job.get(timeout=TIMEOUT_S) == [True, True]
    # It says so when they are back, and by then the job may have run.
    said = f"worker {first.name} is dead; its jobs are back in their queues: 1"
    wait_for(lambda: said in second.log, "it says so")
