"""Workers killed, stopped, cut off and fenced while they hold jobs: another one has them soon."""

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State

from apps import gripping, leases
from apps.leases import EXPIRY_S
from apps.ledger import executions
from batchery import install
from conftest import StartWorker
from support.answers import Answers
from support.event_stream import Events
from support.harness import Worker, open_redis, wait_for
from support.patience import TIMEOUT_S, patient

#: The queue of the batch task.
QUEUE = "apps.leases.batch"

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


def send(url: str, task: str, items: list[Any], countdown: float = 0, **keywords: Any) -> list[str]:
    """Sends jobs as any client does; returns their ids."""
    keywords = {name: str(value) for name, value in keywords.items()}
    options: Any = {"countdown": countdown, "queue": QUEUE if task == "batch" else "celery"}
    with Celery("sender", broker=url, set_as_current=False) as app:
        return [
            app.send_task(f"apps.leases.{task}", [item], keywords, **options).id for item in items
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


def test_jobs_of_a_killed_worker_are_redelivered_soon_and_in_order(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    first = start_worker("apps.leases", "-c", "2")
    jobs = send(redis_url, "batch", [1], book=book, gate=gate)
    wait_for(lambda: len(executions(book)) == 1, "the first job runs")
    jobs += send(redis_url, "batch", [2, 3, 4, 5], book=book)
    wait_for(lambda: held(bare) == 1, "the device has it")
    first.kill()
    # Only now, as it would take one for dead that a busy machine holds up.
    second = start_worker("apps.leases", *IDLE)
    wait_for(lambda: len(waiting(bare)) == 5, "they are back")
    assert waiting(bare) == [1, 2, 3, 4, 5]
    gate.touch()
    serve(redis_url, second)
    wait_for(partial(have_results, bare, jobs), "all are answered", TIMEOUT_S)
    assert results(bare, jobs) == [1, 2, 3, 4, 5]
    # Those behind it had not begun.
    assert sorted(executions(book)) == ["1", "1", "2", "3", "4", "5"]
    wait_for(lambda: held(bare) == 0, "all are acknowledged")


def test_a_worker_that_was_stopped_for_too_long_is_fenced_and_goes_on(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    first = start_worker("apps.leases", "-c", "1")
    jobs = send(redis_url, "batch", [0], book=book, gate=gate)
    wait_for(lambda: len(executions(book)) == 1, "a job runs")
    jobs += send(redis_url, "batch", [1, 2, 3], book=book)
    wait_for(lambda: held(bare) == 1, "the device has it")
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
    later = send(redis_url, "batch", [4], book=book)
    wait_for(partial(have_results, bare, later), "the first worker goes on", TIMEOUT_S)
    wait_for(lambda: held(bare) == 0, "all are acknowledged")
    assert "its leases were handed on" in first.log
    assert bare.mget([f"celery-task-meta-{each}" for each in jobs]) == stored
    # What waited in the worker may begin before it knows; Redis refuses those results, too.
    assert Counter(executions(book))["4"] == 1
    assert first.stop() == 0


def test_events_of_a_job_whose_worker_is_killed_go_on_with_the_next_worker(
    start_worker: StartWorker, redis_url: str, book: Path, gate: Path
) -> None:
    leases.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    options = {"book": str(book), "gate": str(gate)}
    first = start_worker("apps.leases", "-c", "1", "-E")
    with Events(leases.app) as events:
        job = leases.batch.delay("a", **options)
        events.of(job.id, "task-started")
        first.kill()
        gate.touch()
        second = start_worker("apps.leases", "-c", "1", "-E")
        assert job.get(timeout=TIMEOUT_S) == "a"
        events.of(job.id)
        # Nothing comes late: the events of a later job come last.
        events.of(leases.batch.delay("b", **options).id)
    told = events.all_of(job.id)
    assert [(event["hostname"], event["type"]) for event in told] == [
        (first.name, "task-received"),
        (first.name, "task-started"),
        (second.name, "task-received"),
        (second.name, "task-started"),
        (second.name, "task-succeeded"),
    ]
    # Without gossip, workers do not know each other's clocks.
    for hostname in (first.name, second.name):
        clocks = [event["clock"] for event in told if event["hostname"] == hostname]
        assert clocks == sorted(set(clocks))
    state: Any = State()
    for event in events.seen:
        state.event(event)
    task = state.tasks[job.id]
    assert (task.state, task.worker.hostname) == ("SUCCESS", second.name)


def test_nobody_fences_a_device_whose_function_holds_the_interpreter(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    gripping.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.gripping", "-c", "1")
    # It would take the job over from one that gives no sign of life.
    other = start_worker("apps.gripping", "-c", "1")
    with Answers(redis_url) as answers:
        job = gripping.grip.delay(3 * EXPIRY_S, book=str(book))
        assert job.get(timeout=TIMEOUT_S) == 3 * EXPIRY_S
        after = [gripping.grip.delay(0.0, book=str(book)) for _ in range(20)]
        assert [each.get(timeout=TIMEOUT_S) for each in after] == [0.0] * len(after)
        for each in (job, *after):
            assert answers.states(each.id) == {"SUCCESS": 1}
    wait_for(lambda: held(bare) == 0, "all are acknowledged")
    assert Counter(executions(book)) == {str(3 * EXPIRY_S): 1, "0.0": len(after)}
    for started in (worker, other):
        assert "handed on" not in started.log
        assert "is dead" not in started.log
        assert started.stop() == 0


def has_executed(book: Path, times: int) -> bool:
    return len(executions(book)) >= times


def test_a_warm_shutdown_gives_back_at_once_and_in_order(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    jobs = send(redis_url, "batch", [2], book=book, gate=gate)
    send(redis_url, "batch", [0, 1], book=book, gate=gate)
    # What came together does not run together, and waits on the device.
    worker = start_worker("apps.leases", "-c", "1", env={"RATE": "1/s"})
    wait_for(lambda: executions(book) == ["2"], "a job runs")
    wait_for(lambda: held(bare) == 3, "it holds jobs that wait")
    send(redis_url, "batch", [3, 4, 5, 6], book=book)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Warm shutdown" in worker.log, "it ends")
    gate.touch()
    assert worker.wait_exit() == 0
    left = waiting(bare)
    done = {int(item) for item in executions(book)}
    assert left == [item for item in range(7) if item not in done]
    assert left[-1] == 6
    assert have_results(bare, jobs)
    assert {*bare.keys("batchery:*")} <= {b"batchery:token", b"batchery:schema"}


def test_jobs_whose_time_has_not_come_are_held_by_nobody(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    later_s = patient(12)
    worker = start_worker("apps.leases")
    sent_s = time.time()
    jobs = send(redis_url, "batch", list(range(700)), countdown=later_s, book=book)
    wait_for(lambda: bare.zcard(f"{QUEUE}~later") == 700, "they wait for their time")
    worker.kill()
    assert time.time() < sent_s + later_s - 3, "too slow a machine for this test"
    assert not bare.keys("batchery:lease:*")
    start_worker("apps.leases")
    wait_for(partial(have_results, bare, jobs), "they are answered", TIMEOUT_S)
    assert time.time() >= sent_s + later_s
    assert sorted(map(int, executions(book))) == list(range(700))
    assert not bare.exists(f"{QUEUE}~later")


def test_jobs_whose_time_has_not_come_keep_no_other_job_waiting(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path
) -> None:
    start_worker("apps.leases", "-c", "1", env={"PREFETCH": "1"})
    # Far more than a worker prefetches.
    send(redis_url, "batch", list(range(500)), countdown=3600, book=book)
    jobs = send(redis_url, "batch", ["now"], book=book)
    wait_for(partial(have_results, bare, jobs), "it is answered")
    assert executions(book) == ["now"]


def test_a_limit_of_jobs_with_an_eta_leaves_batches_whole(
    start_worker: StartWorker, redis_url: str, bare: Any, book: Path, gate: Path
) -> None:
    jobs = send(redis_url, "batch", list(range(8)), book=book, gate=gate)
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
                sent = app.send_task(QUEUE, [item], options, queue=QUEUE, headers=headers)
                jobs.append(sent.id)
    for round_ in range(1, 4):
        worker = start_worker("apps.leases", "-c", "1")
        wait_for(partial(have_run, book, 200 * round_), "a part has run")
        worker.kill()
    start_worker("apps.leases", "-c", "1")
    wait_for(partial(have_results, bare, jobs), "all are answered", TIMEOUT_S)
    assert not bare.keys(f"{QUEUE}*t[0-7]*")
