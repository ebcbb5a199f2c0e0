"""Results, notifications and acknowledgements in one step, seen from outside a real worker."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apps import commits
from batchery import BatchTask
from conftest import StartWorker
from support.event_stream import Events
from support.harness import Worker, open_redis, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    return start_module_worker("apps.commits", "-E")


@pytest.fixture
def redis(redis_url: str, worker: Worker) -> Iterator[Any]:
    commits.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    with open_redis(redis_url) as opened:
        # A retry of an earlier test waits in the queue, or under a lease, and is not active.
        wait_for(lambda: not (queued(opened) or leases(opened)), "earlier jobs have ended")
        wait_for(lambda: not worker.inspect(commits.app, "active"), "earlier jobs are counted")
        yield opened


def stored(redis: Any, job_id: str) -> Any:
    content = redis.get(f"celery-task-meta-{job_id}")
    return content and json.loads(content)


def queued(redis: Any) -> int:
    """How many jobs wait in the queues of all tasks."""
    return sum(int(redis.llen(name)) for name in commits.app.tasks)


def leases(redis: Any) -> dict[str, Any]:
    """Task id -> token, of all leases there are."""
    found = {}
    for key in redis.scan_iter("batchery:lease:*"):
        for token, value in redis.hgetall(key).items():
            message = json.loads(value.partition(b"\0")[2])
            found[message["headers"]["id"]] = (key, token)
    return found


def counts(worker: Worker) -> dict[str, Any]:
    batches: dict[str, int] = worker.inspect(commits.app, "stats")["pool"]["batches"]
    return batches


@contextlib.contextmanager
def one_batch(worker: Worker, task: BatchTask = commits.shout) -> Iterator[None]:
    """What the block sends waits in Redis until all is there: the idle device takes it at once."""
    options: dict[str, Any] = {"destination": [worker.name], "reply": True, "timeout": TIMEOUT_S}
    assert commits.app.control.cancel_consumer(task.name, **options)
    yield
    assert commits.app.control.add_consumer(task.name, **options)


def test_mixed_batch_is_committed_or_traced_job_by_job(
    worker: Worker, redis: Any, tmp_path: Path
) -> None:
    before = counts(worker)
    link = commits.remember.s(str(tmp_path / "linked"))
    with one_batch(worker):
        plain = [commits.shout.delay(f"text {number}") for number in range(5)]
        linked = commits.shout.apply_async(("linked",), link=link)
        bad = commits.shout.delay("bad")
    answers = [job.get(timeout=TIMEOUT_S) for job in (*plain, linked)]
    assert answers == [*(f"TEXT {number} of 7" for number in range(5)), "LINKED of 7"]
    assert "LookupError" in repr(bad.get(timeout=TIMEOUT_S, propagate=False))
    linked_to = tmp_path / "linked"
    wait_for(lambda: linked_to.exists() and linked_to.read_text(), "the callback has run")
    assert linked_to.read_text() == "LINKED of 7"
    wait_for(lambda: not leases(redis), "no lease is left")

    def counted() -> bool:
        now = counts(worker)
        return bool(now["committed_jobs"] == before["committed_jobs"] + 5)

    wait_for(counted, "five committed jobs")
    assert counts(worker)["fenced_jobs"] == before["fenced_jobs"]


def test_jobs_with_callbacks_are_finished_together(
    worker: Worker, redis: Any, tmp_path: Path
) -> None:
    link = commits.remember.s("nowhere").set(queue="nobody")
    with one_batch(worker):
        jobs = [commits.shout.apply_async((f"n{n}",), link=link, priority=n % 2) for n in range(50)]
        redis.config_resetstat()
    answers = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert answers == [f"N{n} of 50" for n in range(50)]
    wait_for(lambda: not leases(redis), "no lease is left")
    # Celery stores a result by this command, one by one.
    assert "cmdstat_setex" not in redis.info("commandstats")
    sent = [json.loads(each)["headers"] for each in redis.lrange("nobody", 0, -1)]
    assert {each["parent_id"] for each in sent} == {job.id for job in jobs}
    assert sorted(each["id"] for each in sent) == sorted(
        child[0][0] for job in jobs for child in stored(redis, job.id)["children"]
    )
    assert not redis.keys("batchery:sent:*")
    redis.delete("nobody")


def test_stored_result_is_celery_s_own_plus_the_batch(worker: Worker, redis: Any) -> None:
    job = commits.shout.apply_async(("me",), {})
    job.get(timeout=TIMEOUT_S)
    meta = stored(redis, job.id)
    assert meta.pop("date_done") < "3"
    assert meta.pop("batch").keys() == {
        *("id", "size", "waited_ms", "padding", "device"),
        *("prepare_ms", "queued_ms", "forward_ms"),
    }
    assert meta == {
        "status": "SUCCESS",
        "result": "ME of 1",
        "traceback": None,
        "children": [],
        "task_id": job.id,
        "name": "apps.commits.shout",
        "args": ["me"],
        "kwargs": {},
        "worker": worker.name,
        "retries": 0,
        "queue": "apps.commits.shout",
    }
    assert 0 < redis.ttl(f"celery-task-meta-{job.id}") <= 1000


def test_events_and_the_log_know_the_result(worker: Worker, redis: Any) -> None:
    with Events(commits.app) as events:
        job = commits.shout.delay("loud")
        told = events.of(job.id)
    assert list(told) == ["task-received", "task-started", "task-succeeded"]
    assert told["task-succeeded"]["result"] == "'LOUD of 1'"
    assert told["task-succeeded"]["runtime"] >= 0
    assert told["task-succeeded"]["batch"]["size"] == 1
    line = rf"Task apps.commits.shout\[{job.id}\] succeeded in [\d.e-]+s: 'LOUD of 1'"
    wait_for(lambda: re.search(line, worker.log), "a line in the log")


def test_the_events_of_a_batch_leave_in_one_message(
    worker: Worker, redis: Any, tmp_path: Path
) -> None:
    with redis.pubsub(ignore_subscribe_messages=True) as channel:
        channel.psubscribe("/*celeryev/task.multi")
        channel.get_message(timeout=TIMEOUT_S)
        with one_batch(worker):
            ids = {commits.shout.delay("many").id for _ in range(60)}

        def succeeded() -> set[str]:
            message = channel.get_message(timeout=1.0)
            body = json.loads(message["data"])["body"] if message else ""
            events = json.loads(base64.b64decode(body)) if body else []
            done = {event["uuid"] for event in events if event["type"] == "task-succeeded"}
            return done & ids

        assert wait_for(succeeded, "events of the batch") == ids


def test_celery_counts_committed_jobs(worker: Worker, redis: Any) -> None:
    def total() -> int:
        return int(worker.inspect(commits.app, "stats")["total"].get("apps.commits.shout", 0))

    before = total()
    for _ in range(3):
        commits.shout.delay("counted").get(timeout=TIMEOUT_S)
    assert total() == before + 3
    wait_for(lambda: not worker.inspect(commits.app, "active"), "no request is left active")


@pytest.mark.parametrize("linked", [False, True], ids=["committed", "by the tracer"])
def test_job_taken_over_by_another_worker_is_dropped(
    worker: Worker, redis: Any, tmp_path: Path, linked: bool
) -> None:
    before = counts(worker)["fenced_jobs"]
    link = commits.remember.s(str(tmp_path / "linked")) if linked else None
    path = tmp_path / "taken"
    job = commits.wait_at.apply_async((str(path),), link=link)
    wait_for(path.exists, "the job runs")
    key, token = leases(redis)[job.id]
    assert redis.hdel(key, token)
    Path(f"{path}.go").touch()
    wait_for(lambda: counts(worker)["fenced_jobs"] == before + 1, "it is dropped")
    assert stored(redis, job.id) is None
    assert not worker.inspect(commits.app, "active")
    assert commits.shout.delay("after").get(timeout=TIMEOUT_S) == "AFTER of 1"
    assert not (tmp_path / "linked").exists()


def test_a_job_is_settled_although_the_batch_behind_it_runs_for_long(
    worker: Worker, redis: Any, tmp_path: Path
) -> None:
    # Both tasks are short so far: the device does not wait for Redis between two of their batches.
    for number in range(3):
        (tmp_path / f"{number}.go").touch()
        commits.wait_at.delay(str(tmp_path / str(number))).get(timeout=TIMEOUT_S)
        commits.shout.delay("warm").get(timeout=TIMEOUT_S)
    with Events(commits.app) as events:
        with one_batch(worker):
            own: Any = {"queue": commits.shout.name}
            quick = commits.shout.apply_async(("quick",), priority=0, **own)
            # A whole batch: for less the device would look for more first.
            paths = [str(tmp_path / "long")] * 64
            long = [commits.wait_at.apply_async((path,), priority=9, **own) for path in paths]
        wait_for((tmp_path / "long").exists, "the long one runs")
        assert quick.get(timeout=TIMEOUT_S) == "QUICK of 1"
        assert "task-succeeded" in events.of(quick.id)
        assert quick.id not in leases(redis)
        active = {each["id"] for each in worker.inspect(commits.app, "active")}
        assert active == {job.id for job in long}
        (tmp_path / "long.go").touch()
        for job in long:
            job.get(timeout=TIMEOUT_S)


def test_a_job_that_was_committed_before_its_device_died_does_not_run_again(
    worker: Worker, redis: Any, tmp_path: Path
) -> None:
    before = counts(worker)
    paths = [tmp_path / str(number) for number in range(3)]
    with one_batch(worker, commits.hold):
        jobs = [commits.hold.delay(str(path)) for path in paths]
    wait_for(lambda: paths[0].exists() and paths[0].read_text(), "the batch is committed")
    assert paths[0].read_text() == "committed committed committed"
    (device,) = worker.devices()
    device.kill()
    for job, path in zip(jobs, paths, strict=True):
        assert job.get(timeout=TIMEOUT_S) == {"hold": str(path)}
        assert Path(f"{path}.runs").read_text() == "x"
    assert commits.shout.delay("after").get(timeout=TIMEOUT_S) == "AFTER of 1"
    assert [Path(f"{path}.runs").read_text() for path in paths] == ["x", "x", "x"]
    now = counts(worker)
    assert now["device_restarts"] == before["device_restarts"] + 1
    assert now["failed_jobs"] == before["failed_jobs"]
