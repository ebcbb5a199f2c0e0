"""A completion backend is the app's own, with what a completion adds."""

import threading
from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from batchery.completion import JobCompletion, completing
from batchery.retry import RetryDeadline, RetryDeadlineExceeded
from batchery_worker.completion.backend import STORE_RETRIES, DeadlineRetry, for_completion


def app_with(backend: str, **conf: Any) -> Celery:
    app = Celery("completion", broker="memory://", backend=backend, set_as_current=False)
    app.conf.update(conf)
    return app


def test_backend_tries_again_for_a_while_within_a_completion_alone() -> None:
    backend = for_completion(app_with("cache+memory://").backend)
    assert not backend.always_retry
    with completing(JobCompletion()):
        assert (backend.always_retry, backend.max_retries) == (True, STORE_RETRIES)


def test_retries_that_the_app_chose_are_kept() -> None:
    app = app_with(
        "redis://127.0.0.1:1/0", result_backend_always_retry=True, result_backend_max_retries=3
    )
    backend = for_completion(app.backend)
    assert (backend.always_retry, backend.max_retries) == (True, 3)
    assert not isinstance(backend.client.get_retry(), DeadlineRetry)


def test_class_that_the_app_chose_stays_visible() -> None:
    backend: Any = app_with("redis://127.0.0.1:1/0").backend
    ours = for_completion(backend)
    assert ours is backend
    assert (isinstance(ours, RedisBackend), ours.stock_class) == (True, RedisBackend)
    assert for_completion(ours) is ours


def test_facts_of_the_batch_are_stored_within_a_completion_alone() -> None:
    backend = for_completion(app_with("cache+memory://").backend)
    with completing(JobCompletion("t1", info={"size": 3})):
        backend.store_result("t1", 1, "SUCCESS")
    backend.store_result("t2", 2, "SUCCESS")
    assert backend.get_task_meta("t1")["batch"] == {"size": 3}
    assert "batch" not in backend.get_task_meta("t2")


def test_backends_of_other_threads_stay_as_they_are() -> None:
    app = app_with("redis://127.0.0.1:1/0")
    seen: list[type] = []
    thread = threading.Thread(target=lambda: seen.append(type(for_completion(app.backend))))
    thread.start()
    thread.join()
    assert type(app.backend) is RedisBackend
    assert seen != [RedisBackend]


def fail() -> None:
    raise RedisConnectionError("refused")


def test_client_waits_within_a_completion_until_its_deadline() -> None:
    pauses: list[float] = []
    deadline = RetryDeadline(0.2, clock=lambda: sum(pauses), sleep=pauses.append)
    retry = DeadlineRetry(Retry(NoBackoff(), 0))
    with completing(JobCompletion(deadline=deadline)), pytest.raises(RetryDeadlineExceeded):
        retry.call_with_retry(fail, lambda _: None)
    assert pauses == [0.05, 0.1]


def test_client_does_not_wait_outside_of_a_completion() -> None:
    retry = DeadlineRetry(None)
    with pytest.raises(RedisConnectionError):
        retry.call_with_retry(fail, lambda _: None)
