"""What listens to a job hears the same as from Celery, and costs no job the fast way.

Each worker has everything that can listen: hooks, receivers of signals, Sentry.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from celery import Celery

from apps.listened import GATE, HOOKED, PLAIN, SENT, TRACE
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.patience import TIMEOUT_S

pytest.importorskip("sentry_sdk")

#: What differs from message to message, and from worker to worker.
VOLATILE = {"hostname", "delivery_info", "properties", "reply_to", "correlation_id", "root_id"}
VOLATILE |= {"id", "eta", "headers", "baggage", "sentry-trace", "sentry-task-enqueued-time"}
# Only our own tasks say when they were sent anew.
VOLATILE |= {"batchery_sent_at"}

#: Jobs that Sentry hears of, and all jobs beside them.
FAILURES, JOBS = 20, 400


@pytest.fixture(scope="module")
def workers(start_module_worker: StartWorker) -> dict[str, Worker]:
    """One of ours and one of Celery's, each on a queue of its own."""
    sentry = {"LISTENED_SENTRY": "0"}
    stock = {**sentry, "LISTENED_AS": "stock"}
    return {
        "batchery": start_module_worker("apps.listened", "-Q", "batchery", env=sentry),
        "stock": start_module_worker("apps.listened", "-Q", "stock", "-P", "solo", env=stock),
    }


@pytest.fixture
def redis(redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url, decode_responses=True) as client:
        yield client


def lines(redis: Any, key: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in redis.lrange(key, 0, -1)]


def heard(redis: Any, client: Celery, system: str, word: str) -> list[dict[str, Any]]:
    """What the listeners of one job were told, in order."""
    # The mark is the task's keyword, and the id of the job.
    task_id = f"{system}-{word}"
    job = client.send_task(HOOKED, (word,), {"mark": task_id}, queue=system, task_id=task_id)
    job.get(timeout=TIMEOUT_S, propagate=False)

    def ended() -> list[dict[str, Any]]:
        found = lines(redis, TRACE.format(system, task_id))
        states = [each.get("state") for each in found if each["kind"] == "task_postrun"]
        return found if states and states[-1] != "RETRY" else []

    found = wait_for(ended, "the last listener")
    text = json.dumps(found).replace(task_id, "the id")
    return [without_volatile(each) for each in json.loads(text)]


def without_volatile(line: dict[str, Any]) -> dict[str, Any]:
    request = {
        key: value
        for key, value in line.get("request", {}).items()
        # Names that begin so are of no use to a listener: the tracer's own notes.
        if key not in VOLATILE and not key.startswith("_")
    }
    return {**line, "request": request}


@pytest.mark.parametrize("word", ["work", "fail", "again", "refuse", "break"])
def test_listeners_hear_what_they_hear_from_celery(
    workers: dict[str, Worker], redis: Any, client: Celery, word: str
) -> None:
    ours, stock = (heard(redis, client, system, word) for system in ("batchery", "stock"))
    assert [each["kind"] for each in ours] == [each["kind"] for each in stock]
    assert ours == stock


def wait_idle(worker: Worker, client: Celery) -> None:
    """Waits until what listens to the jobs of earlier tests has returned."""
    wait_for(lambda: not worker.inspect(client, "active"), "an idle worker")


def tracer_jobs(worker: Worker, client: Celery, committed: int) -> dict[str, int]:
    """How many jobs took the tracer, once so many were committed by the device."""

    def figures() -> Any:
        batches: dict[str, Any] = worker.inspect(client, "stats")["pool"]["batches"]
        # The caller has its result before those that listen have heard of it.
        return batches if batches["committed_jobs"] >= committed else None

    found = wait_for(figures, f"{committed} jobs that the device has committed")
    assert found["committed_jobs"] == committed
    slow: dict[str, int] = found["tracer_jobs"]
    return slow


def committed_by(worker: Worker, client: Celery) -> int:
    wait_idle(worker, client)
    return int(worker.inspect(client, "stats")["pool"]["batches"]["committed_jobs"])


def test_what_listens_does_not_take_the_fast_way_from_successes(
    workers: dict[str, Worker], redis: Any, client: Celery
) -> None:
    worker = workers["batchery"]
    before = committed_by(worker, client)
    slow = tracer_jobs(worker, client, before)
    heard(redis, client, "batchery", "once")
    assert tracer_jobs(worker, client, before + 1) == slow
    assert "takes Celery's tracer" not in worker.log


def test_slow_hook_holds_up_neither_its_own_job_nor_others(
    workers: dict[str, Worker], redis: Any, client: Celery
) -> None:
    slow = client.send_task(HOOKED, ("slow",), queue="batchery")
    assert slow.get(timeout=TIMEOUT_S) == "SLOW"

    def last() -> str:
        return str(lines(redis, TRACE.format("batchery", slow.id))[-1]["kind"])

    wait_for(lambda: last() == "on_success", "the slow hook")
    assert client.send_task(PLAIN, ("fast",), queue="batchery").get(timeout=TIMEOUT_S) == "FAST"
    assert workers["batchery"].inspect(client, "ping") == {"ok": "pong"}
    assert last() == "on_success"
    redis.set(GATE, "open")
    # Before another test empties Redis.
    wait_for(lambda: last() != "on_success", "the slow hook has returned")


def sent(redis: Any, system: str) -> list[dict[str, Any]]:
    """What Sentry was sent since the last look."""
    key = SENT.format(system)
    # In one step, or an event that comes between the two is lost.
    with redis.pipeline() as step:
        found, _ = step.lrange(key, 0, -1).delete(key).execute()
    return [json.loads(line) for line in found]


def grouping(event: dict[str, Any]) -> list[Any]:
    """What Sentry groups an event by: types, and the frames of the app's own code."""
    return [
        (
            exception["type"],
            exception["module"],
            exception["mechanism"]["type"],
            [
                (frame["module"], frame["function"], frame["context_line"])
                for frame in exception["stacktrace"]["frames"]
                if frame["module"].startswith("apps.") and frame["function"] != "plain"
            ],
        )
        for exception in event["exception"]["values"]
    ]


def test_sentry_is_sent_one_event_per_failure_grouped_as_celery_s(
    workers: dict[str, Worker], redis: Any, client: Celery
) -> None:
    for system, worker in workers.items():
        # So that nothing of an earlier test is told later.
        wait_idle(worker, client)
        sent(redis, system)
    client.send_task(PLAIN, ("fail",), queue="stock").get(timeout=TIMEOUT_S, propagate=False)
    (of_stock,) = wait_for(lambda: sent(redis, "stock"), "an event of Celery's worker")
    before = committed_by(workers["batchery"], client)
    step = JOBS // FAILURES
    words = ["work" if number % step else "fail" for number in range(JOBS)]
    jobs = [client.send_task(PLAIN, (word,), queue="batchery") for word in words]
    failed = {job.id for job, word in zip(jobs, words, strict=True) if word == "fail"}
    for job in jobs:
        job.get(timeout=TIMEOUT_S, propagate=False)
    tracer_jobs(workers["batchery"], client, before + JOBS - FAILURES)
    wait_for(lambda: redis.llen(SENT.format("batchery")) >= FAILURES, "events")
    found = sent(redis, "batchery")
    events = [each["payload"] for each in found]
    assert [each["type"] for each in found] == ["event"] * FAILURES
    assert {event["tags"]["celery_task_id"] for event in events} == failed
    expected = grouping(of_stock["payload"])
    assert expected[-1][0] == "LookupError"
    assert [grouping(event) for event in events] == [expected] * FAILURES


def test_sampled_trace_becomes_a_transaction_around_the_device_s_work(
    start_worker: StartWorker, redis: Any, client: Celery
) -> None:
    # A list of its own: the module's worker may still tell of an earlier test.
    env = {"LISTENED_SENTRY": "1", "LISTENED_AS": "traced"}
    worker = start_worker("apps.listened", "-Q", "traced", env=env)
    job = client.send_task(PLAIN, ("nap",), queue="traced")
    assert job.get(timeout=TIMEOUT_S) == "NAP"
    (found,) = wait_for(lambda: sent(redis, "traced"), "a transaction")
    assert found["type"] == "transaction"
    transaction = found["payload"]
    assert transaction["transaction"] == PLAIN
    assert transaction["tags"]["celery_task_id"] == job.id
    assert transaction["contexts"]["trace"]["op"] == "queue.task.celery"
    (span,) = [each for each in transaction["spans"] if each["op"] == "queue.process"]
    for each in (transaction, span):
        assert seconds(each["timestamp"]) - seconds(each["start_timestamp"]) >= 0.2
    assert tracer_jobs(worker, client, 1) == {}


def seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
