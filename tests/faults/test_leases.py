"""Workers killed, stopped, cut off and fenced while they hold jobs: another one has them soon."""

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery

from apps.ledger import executions
from batchery import install
from benchmarks.chaos.proxy import Proxy
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.patience import patient

TIMEOUT_S = patient(60.0)

#: Serves no queue in which there is anything; it looks after the others.
IDLE = ("-Q", "nothing", "-c", "1")


@pytest.fixture
def bare(redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


#: The queue of the batch task.
QUEUE = "apps.leases.batch"


def send(url: str, items: list[Any], countdown: float = 0, **keywords: Any) -> list[str]:
    """Sends jobs as any client does; returns their ids."""
    keywords = {name: str(value) for name, value in keywords.items()}
    with Celery("sender", broker=url, set_as_current=False) as app:
        options: dict[str, Any] = {"countdown": countdown, "queue": QUEUE}
        return [
            app.send_task("apps.leases.batch", [item], keywords, **options).id for item in items
        ]


def results(bare: Any, ids: list[str]) -> list[Any]:
    """What is stored, in order."""
    found = bare.mget([f"celery-task-meta-{each}" for each in ids])
    return [json.loads(each)["result"] for each in found if each]


def have_results(bare: Any, ids: list[str]) -> bool:
    return len(results(bare, ids)) == len(ids)


def have_run(book: Path, count: int) -> bool:
    return book.exists() and len(executions(book)) > count


def held(bare: Any) -> int:
    """Jobs that any worker has leased."""
    return sum(bare.hlen(key) for key in bare.keys("batchery:lease:*"))


def waiting(bare: Any) -> list[Any]:
    """First arguments of what waits in the queue, in the order in which it will be taken."""
    raw = [json.loads(each) for each in reversed(bare.lrange(QUEUE, 0, -1))]
    return [json.loads(each["headers"]["argsrepr"].strip("[](,)")) for each in raw]


def serve(url: str, worker: Worker, queue: str = QUEUE) -> None:
    """Lets a worker serve one more queue."""
    with Celery("control", broker=url, set_as_current=False) as app:
        answers = app.control.add_consumer(
            queue, destination=[worker.name], reply=True, timeout=TIMEOUT_S, limit=1
        )
        assert answers


def test_a_worker_that_was_stopped_for_too_long_is_fenced_and_goes_on(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    first = start_worker("apps.leases", "-c", "1")
    jobs = send(redis_url, [0], book=book, gate=gate)
    wait_for(lambda: len(executions(book)) == 1, "a job runs")
    jobs += send(redis_url, [1, 2, 3], book=book)
    wait_for(lambda: held(bare) == 4, "the worker has them")
    first.process.send_signal(signal.SIGSTOP)
    second = start_worker("apps.leases", *IDLE)
    wait_for(lambda: len(waiting(bare)) == 4, "they are back")
    assert waiting(bare) == [0, 1, 2, 3]
    gate.touch()
    # The device of the first worker was not stopped; Redis refuses what it has to say.
    serve(redis_url, second)
    wait_for(partial(have_results, bare, jobs), "all are answered", TIMEOUT_S)
    stored = bare.mget([f"celery-task-meta-{each}" for each in jobs])
    second.stop()
    first.process.send_signal(signal.SIGCONT)
    later = send(redis_url, [4], book=book)
    wait_for(partial(have_results, bare, later), "the first worker goes on", TIMEOUT_S)
    wait_for(lambda: held(bare) == 0, "all are acknowledged")
    assert "its leases were handed on" in first.log
    assert bare.mget([f"celery-task-meta-{each}" for each in jobs]) == stored
    # What waited in the worker may begin before it knows; Redis refuses those results, too.
    assert Counter(executions(book))["4"] == 1
    assert first.stop() == 0


def test_worker_survives_a_flushall(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    worker = start_worker("apps.leases")
    for _ in range(3):
        bare.flushall()
        jobs = send(redis_url, [1, 2, 3], book=book)
        wait_for(partial(have_results, bare, jobs), "the worker works", TIMEOUT_S)
    assert worker.stop() == 0


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Any]:
    port = urlsplit(redis_url).port
    assert port
    with contextlib.closing(Proxy(port)) as made:
        yield made


def test_job_that_runs_while_the_connection_breaks_runs_once(
    start_worker: StartWorker,
    redis_url: str,
    bare: Any,
    book: Path,
    gate: Path,
    proxy: Any,
) -> None:
    through = redis_url.replace(f":{urlsplit(redis_url).port}", f":{proxy.port}")
    worker = start_worker("apps.leases", "-c", "1", env={"CELERY_BROKER_URL": through})
    jobs = send(redis_url, [0], book=book, gate=gate)
    wait_for(lambda: len(executions(book)) == 1, "a job runs")
    jobs += send(redis_url, [1, 2, 3], book=book)
    for _ in range(2):
        wait_for(lambda: proxy.cut() > 2, "both the worker and its device are connected")
    gate.touch()
    wait_for(partial(have_results, bare, jobs), "all are answered", TIMEOUT_S)
    assert executions(book) == ["0", "1", "2", "3"]
    wait_for(lambda: held(bare) == 0, "all are acknowledged")
    assert waiting(bare) == []
    assert "its leases were handed on" not in worker.log


def has_executed(book: Path, times: int) -> bool:
    return len(executions(book)) >= times


def test_a_warm_shutdown_gives_back_at_once_and_in_order(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    worker = start_worker("apps.leases", "-c", "1")
    jobs = send(redis_url, [0], book=book, gate=gate)
    wait_for(lambda: len(executions(book)) == 1, "a job runs")
    # More than a batch, of which one is taken ahead.
    send(redis_url, list(range(1, 20)), book=book)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in worker.log, "it ends")
    gate.touch()
    assert worker.wait_exit() == 0
    done = {int(item) for item in executions(book)}
    assert waiting(bare) == [item for item in range(20) if item not in done]
    assert len(done) <= 1 + 8
    assert have_results(bare, jobs)
    assert {*bare.keys("batchery:*")} <= {b"batchery:token", b"batchery:schema"}


def test_jobs_whose_time_has_not_come_keep_no_other_job_waiting(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    start_worker("apps.leases", "-c", "1", env={"PREFETCH": "1"})
    # Far more than a worker prefetches.
    send(redis_url, list(range(500)), countdown=3600, book=book)
    jobs = send(redis_url, ["now"], book=book)
    wait_for(partial(have_results, bare, jobs), "it is answered")
    assert executions(book) == ["now"]


def test_a_limit_of_jobs_with_an_eta_leaves_batches_whole(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    jobs = send(redis_url, list(range(8)), book=book, gate=gate)
    start_worker("apps.leases", "-c", "1", env={"ETA_LIMIT": "2", "PREFETCH": "1"})
    wait_for(partial(has_executed, book, 8), "all of them run at once")
    gate.touch()
    wait_for(partial(have_results, bare, jobs), "all are answered")


def test_no_job_of_a_tenant_is_lost_where_workers_are_killed(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    jobs = []
    with install(Celery("sender", broker=redis_url, set_as_current=False)) as app:
        for tenant in ("one", "two"):
            for number in range(600):
                item, options = f"{tenant}-{number}", {"book": str(book)}
                headers = {"batchery_tenant": tenant}
                sent = app.send_task(
                    "apps.leases.batch", [item], options, headers=headers, queue=QUEUE
                )
                jobs.append(sent.id)
    for round_ in range(1, 4):
        worker = start_worker("apps.leases", "-c", "1")
        wait_for(partial(have_run, book, 200 * round_), "a part has run")
        worker.kill()
    start_worker("apps.leases", "-c", "1")
    wait_for(partial(have_results, bare, jobs), "all are answered", TIMEOUT_S)
    assert not bare.keys(f"{QUEUE}*t[0-7]*")
