"""What `Client` sends to a task that its app does not know."""

import time

import pytest
from celery import Celery
from kombu import Queue

from batchery import Client


def test_a_job_says_when_it_was_sent() -> None:
    with Celery(broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        Client(app).task("embed-of-test").delay("text")
        with app.connection_for_read() as connection, connection.channel() as channel:
            message = Queue("embed-of-test")(channel).get(no_ack=True)
    assert message is not None
    assert message.headers["batchery_sent_at"] == pytest.approx(time.time(), abs=600)
