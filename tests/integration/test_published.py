"""What hooks and receivers of a batch job publish and raise is as with Celery's own tasks."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chord, group
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from redis import Redis

from apps import published as apps
from batchery.errors import DeviceDied
from conftest import StartWorker
from support.harness import Worker, open_redis, unsettled, wait_for
from support.patience import TIMEOUT_S, patient


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    apps.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.published")


@pytest.fixture
def redis(worker: Worker, redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url, decode_responses=True) as client:
        # Hooks of an earlier test's jobs may come after its results, and so may linked jobs.
        wait_for(lambda: not (queued(client) or unsettled(redis_url)), "all is settled")
        wait_for(lambda: not worker.inspect(apps.app, "active"), "all hooks have returned")
        client.delete("letters", "audits", apps.MARKS, apps.BEGUN)
        yield client


def queued(client: Any) -> int:
    """How many jobs wait in the queues of all tasks."""
    return sum(int(client.llen(name)) for name in ("published", *apps.app.tasks))


def run(task: Any, item: str, **options: Any) -> Any:
    """The result of one job."""
    return task.apply_async((item,), **options).get(timeout=TIMEOUT_S)


def test_three_letters_of_a_hook_are_three(redis: Any) -> None:
    with pytest.raises(LookupError):
        run(apps.publish, "fail")
    wait_for(lambda: redis.llen("letters") == 3, "three letters")


def test_a_job_of_another_app_in_another_database_arrives(redis: Any, redis_url: str) -> None:
    # With a callback it takes Celery's tracer.
    assert run(apps.publish, "elsewhere", link=apps.publish.si("linked")) == "elsewhere"
    with Redis.from_url(redis_url, db=1) as other:
        wait_for(lambda: other.llen("ships") == 1, "a ship")


def test_two_tasks_with_one_id_are_two(redis: Any) -> None:
    assert run(apps.publish, "one id", link=apps.publish.si("linked")) == "one id"
    wait_for(lambda: redis.llen("audits") == 2, "two audits")


def test_a_hook_after_the_tracer_finds_what_was_put_on_the_request(redis: Any) -> None:
    link = apps.publish.si("linked")
    result = apps.publish.apply_async(("first",), link=link)
    assert result.get(timeout=TIMEOUT_S) == "first"
    wait_for(lambda: redis.llen(apps.MARKS) == 2, "two marks")
    assert redis.lrange(apps.MARKS, 0, 0) == [f"mark of {result.id}"]


def test_the_first_protocol_loses_no_callback_and_no_member(
    redis: Any, start_module_worker: StartWorker
) -> None:
    start_module_worker("apps.published", "-Q", "first", env={"TASK_PROTOCOL": "1"})
    signature = apps.publish.signature
    callbacks = [signature((each,), immutable=True, queue="first") for each in "abc"]
    signature(("job",), link=callbacks, queue="first").apply_async()
    wait_for(lambda: set(redis.hkeys(apps.BEGUN)) >= {"job", *"abc"}, "all callbacks")
    parts, body = (
        group(signature((each,), immutable=True, queue="first") for each in items)
        for items in ("pq", "xyz")
    )
    chord(parts, body).apply_async()
    wait_for(lambda: set(redis.hkeys(apps.BEGUN)) >= set("xyz"), "the whole body")


@pytest.mark.parametrize(
    ("item", "error", "runs"), [("die", DeviceDied, "3"), ("last", TimeLimitExceeded, "1")]
)
def test_a_death_and_a_hard_limit_are_final(
    redis: Any, item: str, error: type[Exception], runs: str
) -> None:
    with pytest.raises(error):
        run(apps.retry, item, time_limit=patient(2) if item == "last" else None)
    assert redis.hget(apps.BEGUN, item) == runs


@pytest.mark.parametrize("item", ["exit", "exit at once"])
def test_what_ends_its_process_before_the_task_fails_its_job_alone(
    redis: Any, worker: Worker, item: str
) -> None:
    with pytest.raises(WorkerLostError, match="SystemExit"):
        run(apps.publish, item)
    assert run(apps.publish, "after") == "after"
    assert worker.process.poll() is None


def test_a_job_that_is_not_acknowledged_at_its_limit_comes_again(redis: Any) -> None:
    """As with Celery, which gives it back."""
    result = apps.limited.delay("too slow")
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=TIMEOUT_S)
    wait_for(lambda: int(redis.hget(apps.BEGUN, "too slow") or 0) > 1, "the second run")
    apps.app.control.revoke(result.id)
    wait_for(
        lambda: not any(redis.hlen(each) for each in redis.keys("batchery:lease:*")), "no lease"
    )
