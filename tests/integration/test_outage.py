"""The completion of a job meets a Redis that is away: it waits, or its job is given back whole."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.task import Context

from batchery import install
from batchery.completion import JobCompletion, completing
from batchery.retry import RetryDeadline, RetryDeadlineExceeded
from batchery_worker.completion.backend import for_completion, publish_until_deadline
from support.harness import queue_length
from support.own_redis import OwnRedis

BODY = {"task": "outage.body", "args": [], "kwargs": {}, "options": {"task_id": "the-body"}}


@pytest.fixture
def app(own_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    # Celery, kombu and redis-py each wait for some seconds before the deadline begins.
    monkeypatch.setattr("redis.retry.sleep", lambda _: None)
    with install(
        Celery("outage", broker=own_redis.url, backend=own_redis.url, set_as_current=False)
    ) as made:

        @made.task(shared=False, name="outage.body")
        def body(items: list[Any]) -> list[Any]:
            return items

        made.conf.task_publish_retry = False
        made.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0}
        # So that Celery's claim stands for as long as the test.
        made.conf.broker_connection_timeout = 120
        publish_until_deadline(made)
        for_completion(made.backend)
        made.backend.set_chord_size("the-group", 1)
        yield made


def until(own_redis: OwnRedis, pauses: int) -> Callable[[float], None]:
    """Sleeps not at all; in one of the pauses the server comes back."""
    left = [pauses]

    def sleep(_: float) -> None:
        left[0] -= 1
        if not left[0]:
            own_redis.start()

    return sleep


def waiting(deadline: RetryDeadline, tag: str | None = None) -> Any:
    """Makes this thread complete a job, which waits until a deadline."""
    return completing(JobCompletion(publish_tag=tag, deadline=deadline))


def count_part(app: Celery, tag: str, deadline: RetryDeadline) -> None:
    """As the completion of a chord's only part does."""
    backend: Any = app.backend
    request = Context(id="the-part", group="the-group", group_index=0, chord=BODY)
    with waiting(deadline, tag):
        backend.on_chord_part_return(request, "SUCCESS", 7)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
def test_a_result_waits_until_redis_is_back(app: Celery, own_redis: OwnRedis) -> None:
    own_redis.kill()
    with waiting(RetryDeadline(sleep=until(own_redis, 3))):
        app.backend.store_result("job", 42, "SUCCESS")
    assert app.backend.get_task_meta("job")["result"] == 42


def test_a_message_waits_until_redis_is_back_and_is_sent_once(
    app: Celery, own_redis: OwnRedis
) -> None:
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)
    own_redis.kill()
    with waiting(RetryDeadline(sleep=until(own_redis, 2)), "tag"):
        app.send_task("outage.body", [[1]], retry=False)
    assert queue_length(own_redis.url) == 1


def test_a_second_attempt_sends_what_the_first_has_not(app: Celery, own_redis: OwnRedis) -> None:
    for count, queued in ((2, 2), (1, 2), (3, 3)):
        with waiting(RetryDeadline(), "tag"):
            for number in range(count):
                # Its ids and its answer may be others than those of the first one.
                app.send_task("outage.body", [[number, count]])
        assert queue_length(own_redis.url) == queued
    with waiting(RetryDeadline(), "tag"):
        app.send_task("outage.body", [[1]], retries=1)
        app.send_task("outage.another", [[1]], queue="outage.body")
    with waiting(RetryDeadline(), "another tag"):
        app.send_task("outage.body", [[1]])
    assert queue_length(own_redis.url) == 6


def test_job_whose_completion_waited_too_long_does_not_fail(
    app: Celery, own_redis: OwnRedis
) -> None:
    own_redis.kill()
    with pytest.raises(RetryDeadlineExceeded, match="away for 0 s"), waiting(RetryDeadline(0)):
        app.backend.store_result("job", 42, "SUCCESS")
    with pytest.raises(RetryDeadlineExceeded, match="away for 0 s"), waiting(RetryDeadline(0)):
        app.send_task("outage.body", [[1]], retry=False)


def test_commands_outside_a_completion_do_not_wait(app: Celery, own_redis: OwnRedis) -> None:
    backend: Any = app.backend
    own_redis.kill()
    with pytest.raises(app.connection().recoverable_connection_errors):
        backend.client.get("key")


def test_the_next_attempt_of_a_chord_s_last_part_sends_the_body(
    app: Celery, own_redis: OwnRedis
) -> None:
    def lose(**_: Any) -> None:
        own_redis.kill()

    signals.before_task_publish.connect(lose, sender=BODY["task"])
    with pytest.raises(RetryDeadlineExceeded):
        count_part(app, "tag", RetryDeadline(0))
    signals.before_task_publish.disconnect(lose, sender=BODY["task"])
    own_redis.start()
    assert queue_length(own_redis.url) == 0
    # Not that of another job: whoever has the claim may be about to send it.
    count_part(app, "another", RetryDeadline())
    assert queue_length(own_redis.url) == 0
    for _ in range(2):
        count_part(app, "tag", RetryDeadline())
        assert queue_length(own_redis.url) == 1
    assert app.backend.get_state("the-body") == "PENDING"
