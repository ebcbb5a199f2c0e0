"""A worker that has nothing to do gets the jobs that another one only holds."""

import json
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
from support.held_jobs import run_short_batches, send_at_once
from support.patience import patient

BATCH_SIZE = leases.batch.max_batch_size or 0

#: As many processes as devices: one.
ONE = ("-c", "1")

#: Queues to which no task is routed.
ANY = ("-Q", "celery,any,other")

#: How many ordinary jobs Celery itself prefetches for one process.
PREFETCH = 4

HOUR_S = 3600.0

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
    busy = start_worker("apps.leases", *ONE, **PATIENT)
    # Batches are short at first, and so it takes some ahead; then all of them wait for the gate.
    run_short_batches(redis_url, tmp_path, "celery")
    options = {"book": str(tmp_path / "book"), "gate": str(tmp_path / "gate")}
    jobs = send_at_once(redis_url, "celery", range(3 * BATCH_SIZE), options)
    wait_for(lambda: unsettled(redis_url) == len(jobs), "it holds all of them")
    wait_for(lambda: have_begun(tmp_path), "it has begun")
    # It may wait for ordinary jobs, but for no batch job.
    assert not any(json.loads(entry)[0] for entry in bare.hvals(Keys().waiting))
    began = have_begun(tmp_path)
    idle = start_worker("apps.leases", *ONE, **PATIENT)
    # One batch runs and one is prepared where they are; the others have a device now.
    wait_for(lambda: have_begun(tmp_path) > began, "the other one has begun")
    wait_for(lambda: busy.has_logged("jobs go back to their queue", 1), "it says so")
    finish(tmp_path, bare, jobs)
    wait_for(lambda: idle.has_logged("succeeded in", 1), "it has done some")


@pytest.mark.parametrize("queues", [("celery",), ("any", "other"), ("celery", "any", "other")])
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
    start_worker("apps.leases", *ONE, *ANY, **PATIENT)
    wait_for(lambda: have_begun(tmp_path), "it has begun")
    # One runs, and nobody knows for how long: so no other one is there.
    assert unsettled(redis_url) <= BATCH_SIZE + PREFETCH
    waiting = sum(queue_length(redis_url, queue) for queue in queues)
    assert waiting >= len(jobs) - BATCH_SIZE - PREFETCH
    finish(tmp_path, bare, jobs)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_ordinary_jobs_that_wait_for_a_process_go_to_a_worker_that_has_nothing_to_do(
    start_worker: StartWorker, redis_url: str, bare: Any, send: Any, tmp_path: Path, pool: str
) -> None:
    busy = start_worker("apps.leases", *ONE, "-P", pool, **PATIENT)
    send("late", range(100, 101), countdown=HOUR_S)
    jobs = [*send("late", range(1)), *send("early", range(1, 3))]
    wait_for(lambda: have_begun(tmp_path) and not queue_length(redis_url), "it holds all of them")
    start_worker("apps.leases", *ONE, "-P", pool, **PATIENT)
    wait_for(lambda: have_begun(tmp_path) == 2, "the other one has begun")
    wait_for(lambda: busy.has_logged("jobs go back to their queue", 1), "it says so")
    finish(tmp_path, bare, jobs)
    wait_for(lambda: unsettled(redis_url) == 1, "only the job for later is left")


def test_jobs_that_come_at_once_are_shared_by_all_that_wait(
    start_worker: StartWorker, bare: Any, send: Any, tmp_path: Path, redis_url: str
) -> None:
    workers = [start_worker("apps.leases", *ONE, ready=False, **PATIENT) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    wait_for(partial(waits, bare, 2), "both wait for work")
    leases.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    options = {"book": str(tmp_path / "book"), "gate": str(tmp_path / "gate")}
    jobs = leases.batch.submit_many(range(2 * BATCH_SIZE), options)
    # No batch ends before the gate opens. A few could be for the processes, as ordinary jobs.
    wait_for(lambda: have_begun(tmp_path) >= 2 * BATCH_SIZE - PREFETCH, "both compute")
    (tmp_path / "gate").touch()
    assert jobs.get(timeout=patient(60)) == list(range(2 * BATCH_SIZE))


def test_no_worker_holds_a_second_batch_the_first_time_while_another_one_is_idle(
    start_worker: StartWorker, redis_url: str, bare: Any, tmp_path: Path
) -> None:
    workers = [start_worker("apps.singles", *ONE, ready=False) for _ in range(3)]
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
        app.control.cancel_consumer(
            "celery", destination=[worker.name], reply=True, timeout=patient(30), limit=1
        )
    wait_for(lambda: waits(bare, 0), "it waits no longer")
