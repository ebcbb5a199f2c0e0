"""A worker that has nothing to do gets the jobs that another one only holds."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import leases, singles
from apps.ledger import executions
from batchery.transport.redis_schema import Keys
from conftest import StartWorker
from support.harness import Worker, open_redis, queue_length, unsettled, wait_for
from support.held_jobs import JOBS, send_to_be_held
from support.patience import patient

BATCH_SIZE = leases.batch.max_batch_size or 0

#: As many processes as devices: one.
ONE = ("-c", "1")

#: That of the batch task, that of ordinary tasks, and two to which no task is routed.
QUEUES = OWN, CELERY, ANY, OTHER = leases.batch.name, "celery", "any", "other"

#: No worker is to take over what another one leases.
PATIENT: Any = {"env": {"LEASE_EXPIRY_S": "60"}}


@pytest.fixture
def bare(redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def send(redis_url: str, tmp_path: Path) -> Any:
    """Sends jobs that are written into a book, and end when there is a gate."""
    options = {"book": str(tmp_path / "book"), "gate": str(tmp_path / "gate")}

    def send(task: str, numbers: range, **more: Any) -> list[str]:
        with Celery("sender", broker=redis_url, set_as_current=False) as app:
            return [
                app.send_task(f"apps.leases.{task}", [number], options, **more).id
                for number in numbers
            ]

    return send


def have_begun(tmp_path: Path) -> int:
    book = tmp_path / "book"
    return len(executions(book)) if book.exists() else 0


def has_begun(tmp_path: Path, jobs: int) -> bool:
    return have_begun(tmp_path) == jobs


def finish(tmp_path: Path, bare: Any, jobs: list[str]) -> None:
    """Opens the gate; every job must have one result and one execution."""
    (tmp_path / "gate").touch()
    keys = [f"celery-task-meta-{job}" for job in jobs]
    wait_for(lambda: bare.exists(*keys) == len(jobs), "all are answered", patient(60))
    book = tmp_path / "book"
    assert Counter(executions(book)) == Counter(str(number) for number in range(len(jobs)))


def waits(bare: Any, workers: int = 1) -> bool:
    return bool(bare.hlen(Keys().waiting) == workers)


def test_batches_that_wait_for_a_busy_device_go_to_a_worker_that_has_nothing_to_do(
    start_worker: StartWorker, redis_url: str, bare: Any, tmp_path: Path
) -> None:
    jobs = send_to_be_held(redis_url, tmp_path)
    busy = start_worker("apps.singles", *ONE, **PATIENT)
    wait_for(lambda: unsettled(redis_url) == len(jobs) == JOBS, "it holds all of them")
    wait_for(lambda: has_begun(tmp_path, 1), "it has begun one")
    assert waits(bare, 0)
    idle = start_worker("apps.singles", *ONE, **PATIENT)
    wait_for(lambda: has_begun(tmp_path, 2), "the other one has begun one")
    wait_for(lambda: busy.has_logged("jobs go back to their queue", 1), "it says so")
    finish(tmp_path, bare, jobs)
    wait_for(lambda: idle.has_logged("succeeded in", 1), "it has done some")


@pytest.mark.parametrize("queues", [(OWN,), (CELERY,), (ANY, OTHER), (OWN, ANY, OTHER)])
def test_a_worker_takes_no_more_than_its_device_can_begin_where_batches_may_be_long(
    *,
    start_worker: StartWorker,
    redis_url: str,
    bare: Any,
    send: Any,
    tmp_path: Path,
    queues: tuple[str, ...],
) -> None:
    count = 3 * BATCH_SIZE
    numbers = [range(part * count, (part + 1) * count) for part in range(len(queues))]
    jobs = [
        job
        for queue, each in zip(queues, numbers, strict=True)
        for job in send("batch", each, queue=queue)
    ]
    start_worker("apps.leases", *ONE, "-Q", ",".join(QUEUES), **PATIENT)
    wait_for(lambda: have_begun(tmp_path), "it has begun")
    # Celery hands those on that came by a queue of ordinary tasks.
    wait_for(lambda: unsettled(redis_url) <= BATCH_SIZE, "no other job is there")
    # One runs, and nobody knows for how long.
    assert queue_length(redis_url) >= len(jobs) - BATCH_SIZE
    finish(tmp_path, bare, jobs)


def test_no_worker_holds_a_second_batch_the_first_time_while_another_one_is_idle(
    start_worker: StartWorker, redis_url: str, bare: Any, tmp_path: Path
) -> None:
    workers = [start_worker("apps.singles", *ONE, ready=False, **PATIENT) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()
    with Celery("sender", broker=redis_url, set_as_current=False) as app:
        for number, task in enumerate(singles.TASKS, 1):
            wait_for(partial(waits, bare, len(workers)), "all wait for work")
            folder = tmp_path / task.name
            folder.mkdir()
            options = {"book": str(folder / "book"), "gate": str(folder / "gate")}
            jobs = [app.send_task(task.name, [item], options).id for item in range(len(workers))]
            # None ends before the gate opens: behind another one on a device none would begin.
            wait_for(partial(has_begun, folder, len(jobs)), "each has begun")
            finish(folder, bare, jobs)
            for worker in workers:
                wait_for(partial(worker.has_logged, "succeeded in", number), "each has done one")
    assert {worker.log.count("succeeded in") for worker in workers} == {len(singles.TASKS)}


def test_worker_that_is_told_to_consume_nothing_waits_for_nothing(
    start_worker: StartWorker, redis_url: str, bare: Any
) -> None:
    worker: Worker = start_worker("apps.leases", *ONE, **PATIENT)
    wait_for(partial(waits, bare), "it waits for work")
    with Celery("control", broker=redis_url, set_as_current=False) as app:
        worker.wait_answers(app)
        for queue in (OWN, CELERY):
            app.control.cancel_consumer(
                queue, destination=[worker.name], reply=True, timeout=patient(30), limit=1
            )
    wait_for(lambda: waits(bare, 0), "it waits no longer")
