"""Tenants of one queue on real workers: who sends thousands of jobs keeps nobody waiting."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import tally
from conftest import StartWorker
from support.harness import open_redis, unsettled, wait_for

#: Items of a batch of `tally`.
BATCH = 32

#: What two workers run in one pass.
PASS = 2 * BATCH


def send(url: str, tenant: str, task: str, texts: list[str], **keywords: Any) -> list[str]:
    """Sends jobs as stock clients do."""
    headers = {"batchery_tenant": tenant}
    with Celery("caller", broker=url, set_as_current=False) as app:
        return [
            app.send_task(task, [f"{tenant} {text}"], keywords, headers=headers).id
            for text in texts
        ]


def begun(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.fixture
def start_two(start_worker: StartWorker) -> Any:
    """Starts two workers with one device each."""

    def start() -> None:
        for worker in [start_worker("apps.tally", "-c", "1") for _ in range(2)]:
            worker.wait_ready()

    return start


def test_a_lone_job_begins_within_three_passes_of_thousands_of_another_tenant(
    start_two: Any, redis_url: str, tmp_path: Path
) -> None:
    path, task = tmp_path / "computed", tally.tally.name
    keywords = {"path": str(path), "pause_s": 0.2}
    send(redis_url, "bulk", task, numbers(5000), **keywords)
    send(redis_url, "early", task, ["job"], **keywords)
    start_two()
    wait_for(lambda: "early job" in begun(path), "the job that was there before the workers runs")
    # Each worker had taken what its device runs and what comes next.
    assert begun(path).index("early job") < 3 * PASS + PASS
    ahead = len(begun(path))
    send(redis_url, "late", task, ["job"], **keywords)
    wait_for(lambda: "late job" in begun(path), "the job that came later runs")
    assert begun(path).index("late job") < ahead + 3 * PASS + PASS


def test_two_tenants_with_many_jobs_each_share_the_workers(
    start_two: Any, redis_url: str, tmp_path: Path
) -> None:
    path, task = tmp_path / "computed", tally.tally.name
    keywords = {"path": str(path), "pause_s": 0.05}
    for tenant in "ab":
        send(redis_url, tenant, task, numbers(900), **keywords)
    start_two()
    wait_for(lambda: len(begun(path)) >= 1000, "many have run", 60)
    halves = Counter(line.split()[0] for line in begun(path)[:1000])
    # But for what was taken before anybody knew of two tenants.
    assert abs(halves["a"] - halves["b"]) <= 4 * PASS
    wait_for(lambda: unsettled(redis_url) == 0, "all have run", 60)
    assert len(set(begun(path))) == len(begun(path)) == 1800


def test_ordinary_jobs_of_two_tenants_take_turns_and_stock_workers_help(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    book, gate = tmp_path / "book", tmp_path / "gate"
    jobs = []
    for tenant in "ab":
        keywords = {"book": str(book), "gate": str(gate)}
        jobs += send(redis_url, tenant, "apps.leases.late", numbers(600), **keywords)
    ours = start_worker("apps.leases", "-c", "1")
    wait_for(book.exists, "our worker has sorted the queue")
    stock = start_worker("apps.stock").wait_ready()
    gate.touch()
    with open_redis(redis_url) as bare:
        keys = [f"celery-task-meta-{job}" for job in jobs]
        wait_for(lambda: bare.exists(*keys) == len(keys), "all are answered", 90)
        assert not bare.llen("celery")
    done = begun(book)
    assert len(done) == len(set(done)) == 1200
    first = Counter(each.split()[0] for each in done[:200])
    assert min(first.values()) > 50
    assert "succeeded" in stock.log
    for worker in (ours, stock):
        assert "Traceback" not in worker.log
        assert "unregistered" not in worker.log
