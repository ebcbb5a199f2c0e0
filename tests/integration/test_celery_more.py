"""What Celery's documentation promises beyond canvas and results: hooks, signals, control."""

import contextlib
import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.utils.nodenames import worker_direct

from apps import more
from batchery import BatchTask
from conftest import StartWorker
from support.harness import Worker, device_busy, open_redis, queue_length, wait_for
from support.patience import TIMEOUT_S

#: Keeps the device busy in a block.
Busy = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    more.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.more").wait_answers(more.app)


@pytest.fixture(autouse=True)
def _nothing_traced(redis_url: str) -> None:
    more.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    with open_redis(redis_url) as redis:
        redis.delete(more.TRACE)


def trace(redis_url: str, job_id: str | None = None) -> list[dict[str, Any]]:
    """What was written down, of one job or of none."""
    with open_redis(redis_url) as redis:
        lines = [json.loads(line) for line in redis.lrange(more.TRACE, 0, -1)]
    return [line for line in lines if line["id"] == job_id]


def settled(redis_url: str, job_id: str, kinds: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What was written down of a job, by kind, once all of that is there; nothing else may be."""

    def all_there() -> bool:
        return len(trace(redis_url, job_id)) >= len(kinds)

    with contextlib.suppress(AssertionError):
        wait_for(all_there, "hooks and signals")
    lines = trace(redis_url, job_id)
    assert sorted(line["kind"] for line in lines) == sorted(kinds)
    return {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}


def meta(job: Any) -> dict[str, Any]:
    """What is stored of a job, as Celery reads it."""
    backend: Any = more.app.backend
    stored: dict[str, Any] = backend.get_task_meta(job.id)
    return stored


@pytest.fixture
def busy(worker: Worker, tmp_path: Path) -> Busy:
    """Keeps the device busy in a block."""
    return lambda: device_busy(worker, more.app, more.until.name, tmp_path / "gate")


def test_hooks_and_signals_of_a_success_come_once_each(
    worker: Worker, redis_url: str, busy: Busy
) -> None:
    with busy():
        jobs = [more.hooked.delay(word, mark="!") for word in ("a", "b", "c")]
    for job, word in zip(jobs, "abc", strict=True):
        assert job.get(timeout=TIMEOUT_S) == f"{word}!"
        kinds = ["before_start", "on_success", "after_return"]
        kinds += ["task_received", "task_prerun", "task_postrun", "task_success"]
        seen = settled(redis_url, job.id, kinds)
        (hook,) = seen["on_success"]
        assert (hook["value"], hook["args"], hook["kwargs"]) == (f"{word}!", [word], {"mark": "!"})
        assert hook["request"] == {"id": job.id, "retries": 0, "args": [word]}
        for kind in ("before_start", "task_prerun"):
            assert (seen[kind][0]["args"], seen[kind][0]["kwargs"]) == ([word], {"mark": "!"})
        assert seen["after_return"][0]["status"] == "SUCCESS"
        assert seen["task_postrun"][0]["state"] == "SUCCESS"
        assert seen["task_success"][0]["value"] == f"{word}!"


def test_the_signal_of_a_revoked_job_comes_once(worker: Worker, redis_url: str, busy: Busy) -> None:
    def kinds() -> list[str]:
        return [line["kind"] for line in trace(redis_url, job.id)]

    with busy():
        job = more.hooked.delay("never")
        more.app.control.revoke(job.id, reply=True, timeout=TIMEOUT_S, limit=1)
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT_S)
    wait_for(lambda: "task_revoked" in kinds(), "the signal")
    # A device that has not found out yet how long that takes may have it by then.
    assert sorted(set(kinds()) - {"task_received"}) == ["task_revoked"]
    (revoked,) = [line for line in trace(redis_url, job.id) if line["kind"] == "task_revoked"]
    assert (revoked["terminated"], revoked["expired"]) == (False, False)


def test_an_extended_result_says_what_was_asked_and_by_whom(worker: Worker) -> None:
    job = more.echo.delay("a", tag="b")
    job.get(timeout=TIMEOUT_S)
    stored = meta(job)
    assert (stored["name"], stored["args"], stored["kwargs"]) == (
        more.echo.name,
        ["a"],
        {"tag": "b"},
    )
    assert (stored["worker"], stored["retries"]) == (worker.name, 0)
    assert stored["queue"] == more.echo.name


def test_results_are_written_by_the_serializer_that_the_app_chose(worker: Worker) -> None:
    job = more.echo.delay([1, "two"])
    assert job.get(timeout=TIMEOUT_S) == [1, "two"]
    backend: Any = more.app.backend
    assert backend.get(backend.get_key_for_task(job.id)).decode().startswith(more.MARK)


def test_errors_are_stored_even_if_results_are_ignored(worker: Worker) -> None:
    quiet, failed = more.silent.delay("fine"), more.silent.delay("fail")
    wait_for(lambda: meta(failed)["status"] == "FAILURE", "the error is stored")
    assert meta(quiet)["status"] == "PENDING"


def test_autoretry_backs_off_and_gives_up(worker: Worker) -> None:
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match="still away"):
        more.backing_off.delay("x").get(timeout=TIMEOUT_S)
    assert time.monotonic() - started_s >= 1


def test_autoretry_and_hooks_see_the_exception_itself(worker: Worker, redis_url: str) -> None:
    def hooks(job_id: str) -> list[Any]:
        return [line for line in trace(redis_url, job_id) if line["kind"] == "on_failure"]

    # Its state may be RETRY to the end: Celery sends a retry first, and stores that it did later.
    job = more.calling.delay("down")
    wait_for(lambda: hooks(job.id), "it gives up")
    assert [line["kind"] for line in trace(redis_url)] == ["calling"] * 3
    soft = more.hooked.delay("soft")
    (hook,) = wait_for(lambda: hooks(soft.id), "the hook")
    assert (hook["error"], hook["status"]) == ("Soft('down')", 503)


@pytest.mark.parametrize(
    ("task", "item", "said"),
    [
        (more.throwing, "named by throws", "INFO raised expected"),
        (more.silent, "fail", "INFO raised expected"),
        (more.hooked, "fail", "INFO raised expected"),
        (more.silent, "raise", "ERROR raised unexpected"),
    ],
)
def test_an_exception_that_was_announced_is_no_error_in_the_log(
    worker: Worker, task: BatchTask, item: str, said: str
) -> None:
    job = task.delay(item)
    lines = wait_for(
        lambda: [line for line in worker.log.splitlines() if job.id in line and "raised" in line],
        "a line in the log",
    )
    level, text = said.split(maxsplit=1)
    assert f": {level}/" in lines[0]
    assert text in lines[0]


def test_a_rate_limit_is_kept_and_changed_at_run_time(worker: Worker) -> None:
    started_s = time.monotonic()
    jobs = [more.limited.delay(number) for number in range(5)]
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == list(range(5))
    assert time.monotonic() - started_s >= 0.9
    for limit in ("1/h", "0"):
        replies: Any = more.app.control.rate_limit(
            more.limited.name, limit, reply=True, timeout=TIMEOUT_S, limit=1
        )
        assert "ok" in replies[0][worker.name]
    # By the limit before they would take hours.
    jobs = [more.limited.delay(number) for number in range(20)]
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == list(range(20))


def test_jobs_are_revoked_by_their_stamps_while_they_wait(worker: Worker, busy: Busy) -> None:
    stamped = more.echo.s("never")
    stamped.stamp(customer="42")
    other = more.echo.s("other")
    other.stamp(customer="43")
    control: Any = more.app.control
    with busy():
        revoked, kept = stamped.apply_async(), other.apply_async()
        control.revoke_by_stamped_headers(
            {"customer": ["42"]}, reply=True, timeout=TIMEOUT_S, limit=1
        )
    assert kept.get(timeout=TIMEOUT_S) == "other"
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=TIMEOUT_S)


def test_inspect_knows_where_every_job_is(worker: Worker, busy: Busy, redis_url: str) -> None:
    def is_known(job: Any, state: str) -> bool:
        asked: Any = more.app.control.inspect([worker.name], timeout=TIMEOUT_S).query_task(job.id)
        found = asked[worker.name].get(job.id)
        return bool(found) and found[0] == state

    with busy() as active:
        wait_for(lambda: is_known(active, "active"), "the one that runs is known")
        assert [each["id"] for each in worker.inspect(more.app, "active")] == [active.id]
    reserved = more.pair.delay("waits")
    wait_for(lambda: is_known(reserved, "reserved"), "the one that waits for a second is known")
    assert reserved.id in {each["id"] for each in worker.inspect(more.app, "reserved")}
    scheduled = more.echo.apply_async(("later",), countdown=600)

    def is_planned() -> bool:
        planned = worker.inspect(more.app, "scheduled")
        return scheduled.id in {each["request"]["id"] for each in planned}

    wait_for(is_planned, "its message has come: revoked before, it would be dropped at once")
    more.app.control.revoke(scheduled.id, reply=True, timeout=TIMEOUT_S, limit=1)
    assert is_planned()
    assert scheduled.id in worker.inspect(more.app, "revoked")
    with open_redis(redis_url) as redis:
        # An entry that can be read, and is no job, hides none of the others.
        told = {"delivery_tag": "odd", "delivery_info": {}}
        odd = json.dumps({"body": "", "properties": told, "headers": {"task": more.echo.name}})
        later = f"{more.echo.name}~later"
        redis.zadd(later, {f"{more.echo.name}\0{odd}": time.time() + 600})
        assert is_planned()
        redis.zpopmax(later)
    more.pair.delay("the second")
    assert reserved.get(timeout=TIMEOUT_S) == "waits"


def test_inspect_tells_of_the_worker_itself(worker: Worker) -> None:
    queues = {queue["name"] for queue in worker.inspect(more.app, "active_queues")}
    direct = worker_direct(worker.name).name
    assert queues >= {"celery", direct, more.echo.name}
    assert more.hooked.name in worker.inspect(more.app, "registered")
    assert worker.inspect(more.app, "conf")["worker_direct"] is True
    assert "software -> celery" in worker.inspect(more.app, "report")["ok"]


def test_a_queue_is_added_and_cancelled_at_run_time(worker: Worker) -> None:
    control: Any = more.app.control
    options = {"reply": True, "timeout": TIMEOUT_S, "limit": 1}
    control.add_consumer("extra", **options)
    job = more.echo.apply_async(("there",), queue="extra")
    assert job.get(timeout=TIMEOUT_S) == "there"
    control.cancel_consumer("extra", **options)

    def consumed() -> set[str]:
        return {queue["name"] for queue in worker.inspect(more.app, "active_queues")}

    wait_for(lambda: "extra" not in consumed(), "it is left in the loop's next turn")
    more.echo.apply_async(("nobody",), queue="extra")
    assert more.echo.delay("served").get(timeout=TIMEOUT_S) == "served"
    assert queue_length(more.app.conf.broker_url, "extra") == 1


def test_events_are_switched_on_and_off_at_run_time(worker: Worker) -> None:
    control: Any = more.app.control
    options = {"reply": True, "timeout": TIMEOUT_S, "limit": 1}
    seen: list[dict[str, Any]] = []
    beats: list[dict[str, Any]] = []
    handlers = {"task-succeeded": seen.append, "worker-heartbeat": beats.append}
    with more.app.connection_for_read() as connection:
        receiver = more.app.events.Receiver(connection, handlers=handlers)
        with receiver.consumer_context(wakeup=False) as (listening, _, _):
            # The first event proves that somebody listens.
            while not beats:
                listening.drain_events(timeout=TIMEOUT_S)
            assert more.echo.delay("unseen").get(timeout=TIMEOUT_S) == "unseen"
            # The result is there before the worker has settled the job, which sends the event.
            wait_for(lambda: not worker.inspect(more.app, "active"), "the job is settled")
            (on,) = control.enable_events(**options)
            assert on == {worker.name: {"ok": "task events enabled"}}
            job = more.echo.delay("seen")
            while not seen:
                listening.drain_events(timeout=TIMEOUT_S)
    assert [event["uuid"] for event in seen] == [job.id]
    assert seen[0]["batch"]["size"] == 1
    (off,) = control.disable_events(**options)
    assert off == {worker.name: {"ok": "task events disabled"}}


def test_a_job_can_be_sent_to_one_worker(worker: Worker) -> None:
    job = more.echo.apply_async(("you",), queue=worker_direct(worker.name))
    assert job.get(timeout=TIMEOUT_S) == "you"


def test_the_log_says_how_long_the_device_took(worker: Worker) -> None:
    job = more.nap.delay(0.5)
    job.get(timeout=TIMEOUT_S)

    def said() -> list[str]:
        return re.findall(rf"{job.id}\] succeeded in ([\d.]+)s", worker.log)

    (runtime_s,) = wait_for(said, "a line in the log")
    assert float(runtime_s) >= 0.5


def test_a_call_of_the_users_class_comes_first_once_per_job(worker: Worker, redis_url: str) -> None:
    jobs: Any = more.called.submit_many(["a", "b", "c"])
    device_pids = set(jobs.get(timeout=TIMEOUT_S))
    found = [settled(redis_url, job.id, ["called"])["called"] for job in jobs.results]
    # In the device's process, when the batch has run.
    assert {each["pid"] for (each,) in found} == device_pids
    with open_redis(redis_url) as redis:
        kinds = [json.loads(line)["kind"] for line in redis.lrange(more.TRACE, 0, -1)]
    # Those of an earlier test may come late.
    assert next(kind for kind in kinds if kind in ("ran", "called")) == "ran"
