"""Where the bulk producer sends its jobs."""

import time
from typing import Any

import pytest
from celery import Celery

from batchery import Model, SettingsError, install, register
from batchery.retry import RetryPolicy
from batchery_producer.collector import collector_for
from batchery_producer.publisher import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    UNKNOWN_RATE_S,
    Backpressure,
    Publisher,
)


def make_app(**conf: Any) -> Celery:
    app = install(Celery("producer", broker="memory://", set_as_current=False))
    app.conf.update(conf)
    return app


def sent_headers(app: Celery, queue: str) -> list[Any]:
    """The headers of the messages that wait in a queue, oldest first."""
    headers = []
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            headers.append(message.headers)
    return headers


def find_queue(app: Celery, task: str, queue: str | None = None) -> str:
    """The queue in which one job of the task ends up; also what the publisher says it is."""
    with Publisher(app, task, queue=queue, outage_policy=RetryPolicy(lambda: False)) as publisher:
        publisher.send([("an-id", "an item")])
        name = publisher.queue
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        message = channel.basic_get(name, no_ack=True)
    assert message is not None
    assert message.headers["task"] == task
    return name


def test_unknown_task_uses_a_queue_of_its_name() -> None:
    assert find_queue(make_app(), "stranger") == "stranger"


def test_model_of_the_app_uses_the_model_queue() -> None:
    app = make_app()
    register(app, "vectors", Model, queue="gpu-jobs")
    assert find_queue(app, "vectors") == "gpu-jobs"


def test_publisher_follows_the_app_s_route() -> None:
    assert find_queue(make_app(task_routes={"routed": {"queue": "there"}}), "routed") == "there"


def test_queue_of_the_caller_overrides_others() -> None:
    app = make_app()
    register(app, "vectors-too", Model)
    assert find_queue(app, "vectors-too", "elsewhere") == "elsewhere"


def test_queue_that_the_app_does_not_create_is_refused() -> None:
    app = make_app(task_create_missing_queues=False)
    with pytest.raises(SettingsError, match="nowhere"):
        Publisher(app, "any", queue="nowhere", outage_policy=RetryPolicy(lambda: False))


def test_publisher_of_an_eager_app_is_refused() -> None:
    app = make_app(task_always_eager=True)
    register(app, "vectors-eager", Model)
    with pytest.raises(SettingsError, match="task_always_eager"):
        Publisher(app, "vectors-eager")


def test_collector_of_an_app_without_backend_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no result backend"):
        collector_for(make_app(), RetryPolicy())


def test_jobs_in_bulk_say_when_they_were_sent() -> None:
    app = make_app()
    outage_policy = RetryPolicy(lambda: False)
    before_s = time.time() - 0.001
    with Publisher(app, "timed", headers={"mine": 1}, outage_policy=outage_policy) as publisher:
        publisher.send([("a", "one"), ("b", "two")], {"call": 2, "batchery_sent_at": 7.0})
        publisher.send([("c", "three")])
    headers = sent_headers(app, "timed")
    assert [(each["id"], each["mine"], each.get("call")) for each in headers] == [
        ("a", 1, 2),
        ("b", 1, 2),
        ("c", 1, None),
    ]
    for each in headers:
        assert before_s <= each["batchery_sent_at"] <= time.time() + 0.001


def test_retry_after_with_unknown_rate_is_a_second() -> None:
    backpressure = Backpressure()
    assert backpressure.retry_after_s(10) == UNKNOWN_RATE_S
    backpressure.observe(1.0, 100, 100)
    assert backpressure.retry_after_s(10) == UNKNOWN_RATE_S


def test_retry_after_follows_the_rate_at_which_jobs_are_taken() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(2.0, 100, 50)  # 50 a second
    assert backpressure.retry_after_s(100) == 2.0
    assert backpressure.retry_after_s(1) == 0.02
    assert backpressure.retry_after_s(10_000) == MAX_RETRY_AFTER_S


def test_retry_after_of_a_stalled_queue_is_the_maximum() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(2.0, 100, 0)
    assert backpressure.retry_after_s(1) == MAX_RETRY_AFTER_S


def test_backpressure_observed_twice_at_once_counts_the_next_interval() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(1.0 + MIN_RETRY_AFTER_S / 2, 190, 100)
    backpressure.observe(2.0, 150, 0)
    assert backpressure.retry_after_s(50) == 1.0
