"""How results are collected from Redis: announced ones at once, all others by polls."""

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from batchery.errors import SettingsError
from batchery.retry import RetryPolicy
from batchery_producer.answers import Answer
from batchery_producer.collector import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    POLL_JOBS,
    PollingInterval,
    collector_for,
    entries_by_key,
    read_stored,
)


@given(st.lists(st.tuples(st.integers(0, POLL_JOBS), st.floats(0, 1), st.floats(0, 5))))
def test_polling_interval_stays_between_its_limits(polls: list[tuple[int, float, float]]) -> None:
    interval = PollingInterval()
    for asked, share, poll_s in polls:
        found = int(asked * share)
        next_s = interval.next_s(asked=asked, found=found, announced=0, poll_s=poll_s)
        if found and found == asked:
            assert next_s == 0  # More may be there by now.
        else:
            assert MIN_INTERVAL_S <= next_s <= max(MAX_INTERVAL_S, poll_s)


def test_polling_interval_follows_the_rate_of_results() -> None:
    interval, next_s, found = PollingInterval(), MIN_INTERVAL_S, 0
    for _ in range(50):
        found = round(next_s * 10_000)  # Results per second, of a thousand jobs in flight.
        next_s = interval.next_s(asked=1000, found=found, announced=0, poll_s=0)
    assert 1000 / 16 <= found <= 1000 / 4


@pytest.mark.parametrize(
    "stored", [b"{", b"[]", b'{"status": "SUCCESS", "traceback": null, "task_id"']
)
def test_result_that_cannot_be_read_is_an_error_of_its_job(stored: bytes) -> None:
    backend = Celery("read", backend="redis://127.0.0.1:1", set_as_current=False).backend
    answer = read_stored(backend, stored)
    assert answer is not None
    assert answer.error is not None
    assert "cannot be read" in answer.error[1]


def test_app_without_a_backend_cannot_collect() -> None:
    app = Celery("none", backend="disabled://", set_as_current=False)
    with pytest.raises(SettingsError, match="no result backend"):
        collector_for(app, RetryPolicy())


def test_any_backend_is_polled_job_by_job() -> None:
    app = Celery("polled", backend="cache+memory://", set_as_current=False)
    collector = collector_for(app, RetryPolicy())
    assert collector.headers == {}
    collector.expect(["polled-a", "polled-b"])
    app.backend.store_result("polled-a", 1, "SUCCESS")
    assert dict(collector.collect(0.0)) == {"polled-a": Answer(value=1)}
    collector.forget(["polled-a"])
    assert app.AsyncResult("polled-a").state == "PENDING"
    collector.close()


def test_answers_of_either_protocol_are_read() -> None:
    entry = (b"1-1", {b"ids": b"[]"})
    assert entries_by_key(None) == {}
    assert entries_by_key([[b"key", [entry]]]) == {b"key": [entry]}
    assert entries_by_key({b"key": [[entry]]}) == {b"key": [entry]}
    assert entries_by_key({b"key": []}) == {b"key": []}


# Announcements


# Polls


# Results
