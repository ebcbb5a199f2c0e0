"""Where the bulk producer sends its jobs."""

import time
from typing import Any

import pytest
from celery import Celery

from batchery import Model, SettingsError, install, register
from batchery_producer.publisher import Publisher


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
    with Publisher(app, task, queue=queue) as publisher:
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


def test_queue_that_the_app_does_not_create_is_refused() -> None:
    app = make_app(task_create_missing_queues=False)
    with pytest.raises(SettingsError, match="nowhere"):
        Publisher(app, "any", queue="nowhere")


def test_publisher_of_an_eager_app_is_refused() -> None:
    app = make_app(task_always_eager=True)
    register(app, "vectors-eager", Model)
    with pytest.raises(SettingsError, match="task_always_eager"):
        Publisher(app, "vectors-eager")


def test_jobs_in_bulk_say_when_they_were_sent() -> None:
    app = make_app()
    before_s = time.time() - 0.001
    with Publisher(app, "timed", headers={"mine": 1}) as publisher:
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
