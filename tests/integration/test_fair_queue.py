"""Tenants of one queue on real workers: who sends thousands of jobs keeps nobody waiting."""

from collections import Counter
from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import open_redis, wait_for
from support.patience import patient


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


def test_ordinary_jobs_of_two_tenants_take_turns_and_stock_workers_help(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    book, gate = tmp_path / "book", tmp_path / "gate"
    jobs = []
    for tenant in "ab":
        keywords = {"book": str(book), "gate": str(gate)}
        jobs += send(redis_url, tenant, "apps.leases.late", numbers(600), **keywords)
    # A worker that stands still for a while is no dead one: each job runs once.
    ours = start_worker("apps.leases", "-c", "1", env={"LEASE_EXPIRY_S": "600"})
    wait_for(book.exists, "our worker has sorted the queue")
    stock = start_worker("apps.stock").wait_ready()
    wait_for(lambda: len(begun(book)) == 2, "each worker has begun a job")
    gate.touch()
    with open_redis(redis_url) as bare:
        keys = [f"celery-task-meta-{job}" for job in jobs]
        wait_for(lambda: bare.exists(*keys) == len(keys), "all are answered", patient(90))
        assert not bare.llen("celery")
    done = begun(book)
    assert len(done) == len(set(done)) == 1200
    first = Counter(each.split()[0] for each in done[:200])
    assert min(first["a"], first["b"]) > 50
    assert "succeeded" in stock.log
    for worker in (ours, stock):
        assert "Traceback" not in worker.log
        assert "unregistered" not in worker.log
