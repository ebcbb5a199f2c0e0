"""What jobs, functions, hooks and callbacks do wrong: each costs the jobs concerned, no others."""

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import BackendStoreError, NotRegistered

from apps import ledger
from batchery import InvalidItem, UnserialisableResult, WrongLength
from conftest import StartWorker
from support.harness import Worker, open_redis, unsettled, wait_for
from support.patience import TIMEOUT_S

TASK = "apps.ledger.misbehave"


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
    wait_for(lambda: unsettled(redis_url) == 0, "no message unacknowledged")


def put(redis_url: str, message: Any) -> None:
    """Puts a message on the queue of the task as it is."""
    with open_redis(redis_url) as redis:
        redis.lpush(TASK, message if isinstance(message, bytes) else json.dumps(message))


def template(client: Celery, redis_url: str) -> dict[str, Any]:
    """A message of a batch task, as it lies in Redis."""
    client.send_task(TASK, ["template"], queue="aside")
    return taken(redis_url)


def taken(redis_url: str) -> dict[str, Any]:
    """The message that was put aside."""
    with open_redis(redis_url) as redis:
        found: Any = redis.rpop("aside")
        message: dict[str, Any] = json.loads(found)
    return message


def test_a_result_of_100_mb_is_delivered() -> None:
    mate = ledger.misbehave.delay("mate")
    assert len(ledger.misbehave.delay("huge").get(timeout=TIMEOUT_S)) == 100_000_000
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


def test_a_result_that_redis_does_not_take_fails_its_job_alone() -> None:
    jobs = ledger.misbehave.submit_many(["before", "too huge", "after"])
    with pytest.raises(BackendStoreError, match="too large"):
        jobs[1].get(timeout=TIMEOUT_S)
    assert jobs[0].get(timeout=TIMEOUT_S) == "BEFORE"
    assert jobs[2].get(timeout=TIMEOUT_S) == "AFTER"


@pytest.mark.parametrize("answer", [None, 7, "text", {"a": 1}, True])
def test_an_answer_that_is_no_list_fails_the_batch_and_no_more(answer: Any) -> None:
    jobs = ledger.answering.submit_many(range(3), {"answer": answer})
    for job in jobs:
        with pytest.raises(WrongLength, match="one outcome per item"):
            job.get(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("deep", UnserialisableResult, "JSON cannot write"),
        ("generator", LookupError, "in the middle"),
        ("fussy", Exception, "fussy"),
    ],
)
def test_wrong_answer_of_a_function_fails_its_job_alone(
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


@pytest.mark.parametrize("hook_error", ledger.HOOK_ERRORS)
def test_a_job_whose_on_failure_is_broken_runs_once(
    hook_error: str, tmp_path: Path, redis_url: str
) -> None:
    job_id = ledger.hooked.delay(f"fail {hook_error} {tmp_path / 'runs'}").id

    def is_told() -> bool:
        """Celery stores the failure, and then that of the hook; a result keeps what it has read."""
        result = ledger.hooked.AsyncResult(job_id)
        return result.state == "FAILURE" and not isinstance(result.result, ValueError)

    wait_for(is_told, "the last failure")
    wait_for(lambda: unsettled(redis_url) == 0, "no message unacknowledged")
    assert ledger.executions(tmp_path / "runs") == ["run"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise frozen", r"Frozen\(code=3\)"),
        ("return frozen", r"Frozen\(code=3\)"),
        ("raise nosy", "Nosy: as told"),
        ("return nosy", "Nosy: as told"),
        ("raise argless", "Argless: as told"),
        ("return argless", "Argless: as told"),
        ("no error", r"Failed\(error=None\): give an exception or a text"),
    ],
)
def test_an_odd_error_fails_its_job_alone(text: str, says: str) -> None:
    jobs = ledger.misbehave.submit_many(["before", text, "after"])
    with pytest.raises(Exception, match=says):
        jobs[1].get(timeout=TIMEOUT_S)
    assert jobs[0].get(timeout=TIMEOUT_S) == "BEFORE"
    assert jobs[2].get(timeout=TIMEOUT_S) == "AFTER"


def test_a_slow_on_success_delays_no_other_job(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = ledger.hooked.delay(f"slow until {gate}")
    wait_for(slow.ready, "the result is stored before the hook runs")
    assert ledger.hooked.delay("other").get(timeout=TIMEOUT_S) == "other"
    gate.touch()


def test_a_link_to_an_unknown_task_does_not_hurt_its_job(client: Celery, worker: Worker) -> None:
    callback = client.signature("nobody.knows.me", app=client)
    callback.freeze("unknown-callback")
    job = ledger.misbehave.apply_async(("x",), link=callback)
    assert job.get(timeout=TIMEOUT_S) == "X"
    wait_for(lambda: "nobody.knows.me" in worker.log, "the callback was refused")


@pytest.mark.parametrize("options", [{"serializer": "nobody-has-it"}, {"countdown": "soon"}])
def test_a_callback_that_cannot_be_published_fails_its_job_alone(
    client: Celery, options: dict[str, Any]
) -> None:
    callback = client.signature("apps.ledger.misbehave", app=client, options=options)
    job = ledger.misbehave.apply_async(("x",), link=callback)
    mate = ledger.misbehave.delay("mate")
    assert mate.get(timeout=TIMEOUT_S) == "MATE"
    wait_for(job.ready, "the job has failed")
    assert job.state == "FAILURE"


def test_a_second_callback_that_redis_refuses_fails_its_job_alone(
    client: Celery, redis_url: str
) -> None:
    callbacks = [
        client.signature("apps.ledger.misbehave", app=client, options={"queue": queue})
        for queue in ("celery", "no-queue")
    ]
    with open_redis(redis_url) as redis:
        redis.set("no-queue", "of another type")
        job = ledger.misbehave.apply_async(("x",), link=callbacks)
        mate = ledger.misbehave.delay("mate")
        assert mate.get(timeout=TIMEOUT_S) == "MATE"
        wait_for(job.ready, "the job has failed")
        redis.delete("no-queue")
    assert job.state == "FAILURE"
    assert "no-queue" in str(job.result)


@pytest.mark.parametrize(
    "body",
    [
        "bm90IGpzb24=",  # not json
        "bnVsbA==",  # null
        "W251bGwsIG51bGwsIG51bGxd",  # [null, null, null]
        "W1siYSJdLCB7fSwgN10=",  # [["a"], {}, 7]
        None,
    ],
)
def test_a_malformed_body_costs_only_its_message(
    client: Celery, redis_url: str, body: str | None
) -> None:
    mate = ledger.misbehave.delay("mate")
    message = template(client, redis_url)
    put(redis_url, {**message, "body": body})
    with pytest.raises(InvalidItem, match="malformed"):
        client.AsyncResult(message["headers"]["id"]).get(timeout=TIMEOUT_S)
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


@pytest.mark.parametrize(
    "headers",
    [
        {"timelimit": ["a", 2]},
        {"timelimit": 7},
        {"eta": "soon"},
        {"expires": "soon"},
        {"compression": "none-that-is-known"},
    ],
)
def test_malformed_headers_cost_only_their_message(
    client: Celery, redis_url: str, headers: dict[str, Any]
) -> None:
    mate = ledger.misbehave.delay("mate")
    message = template(client, redis_url)
    put(redis_url, {**message, "headers": {**message["headers"], **headers}})
    with pytest.raises(InvalidItem, match="malformed"):
        client.AsyncResult(message["headers"]["id"]).get(timeout=TIMEOUT_S)
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


def test_a_header_that_cannot_be_handed_to_a_device_stays_in_the_worker(
    client: Celery, redis_url: str
) -> None:
    """JSON reads it, pickle does not: it would end one worker after the other."""
    mate = ledger.misbehave.delay("mate")
    message = template(client, redis_url)
    message["headers"]["group"] = "DEEP"
    put(redis_url, json.dumps(message).replace('"DEEP"', "[" * 600 + "]" * 600).encode())
    assert client.AsyncResult(message["headers"]["id"]).get(timeout=TIMEOUT_S) == "TEMPLATE"
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


def test_a_pickled_job_is_refused(client: Celery) -> None:
    mate = ledger.misbehave.delay("mate")
    job = client.send_task(TASK, ["x"], serializer="pickle")
    with pytest.raises(InvalidItem, match="ContentDisallowed"):
        job.get(timeout=TIMEOUT_S)
    assert mate.get(timeout=TIMEOUT_S) == "MATE"


PICKLED = """
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("pickled", set_as_current=False))
app.conf.update(accept_content=["json", "pickle"], task_default_queue="pickled")

@app.task(base=BatchTask, name="count")
def count(sets: list[set[int]]) -> list[int]:
    return [len(each) for each in sets]
"""


def test_a_pickled_job_runs_where_the_app_accepts_it(
    start_module_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    (tmp_path / "pickled.py").write_text(PICKLED)
    # Celery asks for this variable where it is started by root.
    worker = start_module_worker("pickled", cwd=tmp_path, env={"C_FORCE_ROOT": "1"})
    job = client.send_task("count", [{1, 2}], serializer="pickle", queue="pickled")
    assert job.get(timeout=TIMEOUT_S) == 2
    assert worker.stop() == 0


def test_a_task_that_the_device_does_not_know_fails_its_jobs_and_no_device(client: Celery) -> None:
    jobs = [client.send_task("apps.ledger.late", [number]) for number in range(3)]
    for job in jobs:
        with pytest.raises(NotRegistered, match=r"'apps.ledger.late'"):
            job.get(timeout=TIMEOUT_S)
