"""How results are collected from Redis: announced ones at once, all others by polls."""

import pytest
from celery import Celery

from batchery.errors import SettingsError
from batchery.retry import RetryPolicy
from batchery_producer.collector import Collector, list_entries, read_stored


@pytest.mark.parametrize(
    "stored", [b"{", b"[]", b'{"status": "SUCCESS", "traceback": null, "task_id"']
)
def test_result_that_cannot_be_read_is_an_error_of_its_job(stored: bytes) -> None:
    backend = Celery("read", backend="redis://127.0.0.1:1", set_as_current=False).backend
    answer = read_stored(backend, stored)
    assert answer is not None
    assert answer.error is not None
    assert "cannot be read" in answer.error[1]


@pytest.mark.parametrize("backend", ["disabled://", "cache+memory://"])
def test_app_whose_results_are_not_in_redis_cannot_collect(backend: str) -> None:
    app = Celery("none", backend=backend, set_as_current=False)
    with pytest.raises(SettingsError, match="set result_backend to a Redis URL"):
        Collector(app, RetryPolicy())


def test_answers_of_either_protocol_are_read() -> None:
    entry = (b"1-1", {b"ids": b"[]"})
    assert list_entries(None) == []
    assert list_entries([[b"key", [entry]]]) == [entry]
    assert list_entries({b"key": [[entry]]}) == [entry]
    assert list_entries({b"key": []}) == []
