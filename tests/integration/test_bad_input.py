"""What jobs, functions, hooks and callbacks do wrong: each costs the jobs concerned, no others."""

import json
import time
from contextlib import closing
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import NotRegistered
from redis import Redis

from apps import ledger
from batchery import UnserialisableResult
from conftest import StartWorker
from harness import Worker, queue_length, wait_for

TIMEOUT_S = 60

#: Celery acknowledges a body that it cannot decode, logs it, and stores nothing.
NOT_JSON = "bm90IGpzb24="


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.ledger", "-E")


@pytest.fixture(autouse=True)
def _healthy(redis_url: str, worker: Worker) -> Any:
    """Whatever a test did, its worker still works with the same device, and owes nothing."""
    ledger.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    before = worker.devices()
    yield
    assert ledger.misbehave.delay("still here").get(timeout=TIMEOUT_S) == "STILL HERE", worker.log
    assert worker.process.poll() is None
    assert worker.devices() == before
    wait_for(lambda: queue_length(redis_url, "unacked") == 0, "no message unacknowledged")


def put(redis_url: str, message: Any) -> None:
    """Puts a message on the queue as it is."""
    with closing(Redis.from_url(redis_url)) as redis:
        redis.lpush("celery", message if isinstance(message, bytes) else json.dumps(message))


def template(client: Celery, redis_url: str) -> dict[str, Any]:
    """A message of a batch task, as it lies in Redis."""
    client.send_task("apps.ledger.misbehave", ["template"], queue="aside")
    with closing(Redis.from_url(redis_url)) as redis:
        found: Any = redis.rpop("aside")
        message: dict[str, Any] = json.loads(found)
    return message


def test_a_result_of_100_mb_is_delivered() -> None:
    mate = ledger.misbehave.delay("mate")
    assert len(ledger.misbehave.delay("huge").get(timeout=TIMEOUT_S)) == 100_000_000
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("deep", UnserialisableResult, "JSON cannot write"),
        ("generator", LookupError, "in the middle"),
        ("fussy", Exception, "fussy"),
    ],
)
def test_what_a_function_does_wrong_fails_its_job_alone(
    text: str, error: type[Exception], says: str
) -> None:
    jobs = ledger.misbehave.submit_many(["before", text, "after"])
    with pytest.raises(error, match=says):
        jobs[1].get(timeout=TIMEOUT_S)
    assert jobs[0].get(timeout=TIMEOUT_S) == "BEFORE"
    assert jobs[2].get(timeout=TIMEOUT_S) == "AFTER"


def test_an_exception_that_cannot_be_spelled_fails_its_job_alone() -> None:
    jobs = ledger.misbehave.submit_many(["before", "mute", "after"])
    wait_for(jobs[1].ready, "a result")
    assert jobs[1].state == "FAILURE"
    assert jobs[0].get(timeout=TIMEOUT_S) == "BEFORE"
    assert jobs[2].get(timeout=TIMEOUT_S) == "AFTER"


@pytest.mark.parametrize("text", ["on_success", "after_return", "receiver"])
def test_a_hook_that_raises_does_not_stop_the_worker(text: str, worker: Worker) -> None:
    job, mate = ledger.hooked.delay(text), ledger.hooked.delay("mate")
    assert mate.get(timeout=TIMEOUT_S) == "mate"
    wait_for(job.ready, "a result")


def test_a_broken_on_failure_keeps_the_failure() -> None:
    with pytest.raises(ValueError, match="as told"):
        ledger.hooked.delay("fail").get(timeout=TIMEOUT_S)


def test_a_slow_on_success_delays_no_other_job() -> None:
    slow = ledger.hooked.delay("slow")
    wait_for(slow.ready, "the result is stored before the hook runs")
    started_s = time.monotonic()
    assert ledger.hooked.delay("other").get(timeout=TIMEOUT_S) == "other"
    assert time.monotonic() - started_s < 1.9


def test_a_link_to_an_unknown_task_does_not_hurt_its_job(client: Celery, worker: Worker) -> None:
    callback = client.signature("nobody.knows.me", app=client)
    callback.freeze("unknown-callback")
    job = ledger.misbehave.apply_async(("x",), link=callback)
    assert job.get(timeout=TIMEOUT_S) == "X"
    wait_for(lambda: "nobody.knows.me" in worker.log, "the callback was refused")


def test_an_unknown_task_fails_with_not_registered(client: Celery) -> None:
    with pytest.raises(NotRegistered):
        client.send_task("nobody.knows.me", ["x"]).get(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "body",
    [
        NOT_JSON,
        "WzEsIDJd",  # [1, 2]
        "eyJhIjogMX0=",  # {"a": 1}
        "W251bGwsIG51bGwsIG51bGxd",  # [null, null, null]
        "W1tdLCB7fSwgW11d",  # [[], {}, []]
        "W1siYSJdLCBbMV0sIHt9XQ==",  # [["a"], [1], {}]
        "W3siYSI6MX0sIHt9LCB7fV0=",  # [{"a":1}, {}, {}]
        "W1siYSJdLCB7fSwgN10=",  # [["a"], {}, 7]
    ],
)
def test_a_malformed_body_costs_only_its_message(client: Celery, redis_url: str, body: str) -> None:
    mate = ledger.misbehave.delay("mate")
    message = template(client, redis_url)
    put(redis_url, {**message, "body": body})
    assert mate.get(timeout=TIMEOUT_S) == "MATE"
    job = client.AsyncResult(message["headers"]["id"])
    wait_for(job.ready, "an error for the caller") if body != NOT_JSON else None


@pytest.mark.parametrize(
    "headers",
    [{"timelimit": ["a", 2]}, {"timelimit": 7}, {"eta": "soon"}, {"expires": 7}, {"retries": "x"}],
)
def test_malformed_headers_cost_only_their_message(
    client: Celery, redis_url: str, headers: dict[str, Any]
) -> None:
    message = template(client, redis_url)
    put(redis_url, {**message, "headers": {**message["headers"], **headers}})
    assert ledger.misbehave.delay("mate").get(timeout=TIMEOUT_S) == "MATE"


def test_a_pickled_job_is_refused(client: Celery, worker: Worker) -> None:
    client.send_task("apps.ledger.misbehave", ["x"], serializer="pickle")
    wait_for(lambda: "Refusing to deserialize" in worker.log, "the message was refused")


def test_the_pool_says_that_it_cannot_grow(worker: Worker) -> None:
    for command in (ledger.app.control.pool_grow, ledger.app.control.pool_shrink):
        answers: Any = command(1, destination=[worker.name], reply=True, timeout=20, limit=1)
        (answer,) = answers
        assert "cannot grow or shrink" in str(answer[worker.name]["error"])
