"""How often results are looked for, and where; what is read of them."""

import json

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend
from hypothesis import given
from hypothesis import strategies as st

from batchery.errors import SettingsError
from batchery.retry import RetryPolicy
from batchery_producer.answers import Answer
from batchery_producer.collector import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    REST_PER_POLL,
    AnyCollector,
    PollingInterval,
    RedisCollector,
    collector_for,
    entries_by_key,
    read_stored,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 5000), st.floats(0, 10), st.floats(0, 5))
    )
)
def test_polling_interval_stays_between_its_limits(
    polls: list[tuple[int, int, float, float]],
) -> None:
    interval = PollingInterval()
    for in_flight, found, since_s, poll_s in polls:
        next_s = interval.next_s(
            in_flight=in_flight, found=found, announced=0, since_s=since_s, poll_s=poll_s
        )
        assert MIN_INTERVAL_S <= next_s <= max(MAX_INTERVAL_S, poll_s)


def test_polling_interval_follows_the_rate_of_results() -> None:
    interval = PollingInterval()
    for _ in range(20):  # 10,000 results per second, 1,000 jobs in dispatched.
        next_s = interval.next_s(in_flight=1000, found=100, announced=0, since_s=0.01, poll_s=0.001)
    assert next_s == pytest.approx(1000 / 8 / 10_000)


def next_s(interval: PollingInterval, *, in_flight: int, found: int, since_s: float) -> float:
    return interval.next_s(in_flight=in_flight, found=found, announced=0, since_s=since_s, poll_s=0)


def test_polling_interval_grows_without_results_and_shrinks_with_them() -> None:
    interval = PollingInterval()
    pauses = [
        interval.next_s(in_flight=10, found=0, announced=0, since_s=1, poll_s=0) for _ in range(30)
    ]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_INTERVAL_S
    assert (
        interval.next_s(in_flight=8, found=100, announced=0, since_s=0.1, poll_s=0)
        == MIN_INTERVAL_S
    )


def test_polling_with_announcements_takes_a_tenth_of_the_time() -> None:
    interval = PollingInterval()
    long_s = interval.next_s(in_flight=9000, found=3, announced=5000, since_s=1, poll_s=0.1)
    assert long_s == pytest.approx(0.1 * REST_PER_POLL)
    short_s = interval.next_s(in_flight=9000, found=0, announced=5000, since_s=1, poll_s=0.001)
    assert short_s == MAX_INTERVAL_S


@pytest.mark.parametrize(
    "stored", [b"{", b"[]", b'{"status": "SUCCESS", "traceback": null, "task_id"']
)
def test_result_that_cannot_be_read_is_an_error_of_its_job(stored: bytes) -> None:
    backend = Celery("read", backend="redis://127.0.0.1:1", set_as_current=False).backend
    answer = read_stored(backend, stored)
    assert answer is not None
    assert answer.error is not None
    assert "cannot be read" in answer.error[1]


def test_result_has_the_facts_of_its_batch() -> None:
    batch = {"id": "b7", "size": 3, "padding": 0.2, "forward_ms": 1.5, "device": "cuda:0"}
    backend = Celery("read", backend="redis://127.0.0.1:1", set_as_current=False).backend
    meta = {"status": "SUCCESS", "batch": batch, "task_id": "a", "result": 7}
    answer = read_stored(backend, json.dumps(meta).encode())
    assert answer is not None
    assert (answer.value, answer.batch and answer.batch[:2]) == (7, ("b7", 3))
    assert read_stored(backend, b'{"status": "STARTED"}') is None


def test_app_without_a_backend_cannot_collect() -> None:
    disabled = Celery("none", backend="disabled://", set_as_current=False)
    with pytest.raises(SettingsError, match="no result backend"):
        collector_for(disabled, RetryPolicy())
    other = Celery("other", backend="cache+memory://", set_as_current=False)
    assert isinstance(collector_for(other, RetryPolicy()), AnyCollector)
    ours = Celery("ours", backend="redis://127.0.0.1:1", set_as_current=False)
    assert isinstance(ours.backend, RedisBackend)
    assert isinstance(collector_for(ours, RetryPolicy()), RedisCollector)


def test_any_backend_is_polled_job_by_job() -> None:
    app = Celery("polled", backend="cache+memory://", set_as_current=False)
    collector = AnyCollector(app, RetryPolicy())
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
