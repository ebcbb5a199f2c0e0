"""Which errors of a result backend mean that it is away."""

from typing import Any

from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from batchery.retry import RetryDeadlineExceeded
from batchery_worker.completion.backend import for_completion, is_backend_away


def redis_backend() -> Any:
    return Celery("away", backend="redis://127.0.0.1:1/0", set_as_current=False).backend


def test_backend_that_is_away_is_told_apart_from_one_that_refuses() -> None:
    backend = redis_backend()
    assert is_backend_away(backend, RedisConnectionError("refused"))
    assert not is_backend_away(backend, ResponseError("too large"))
    assert not is_backend_away(backend, ValueError("undecodable"))
    assert not is_backend_away(backend, SystemExit())


def test_cause_of_celerys_own_error_counts() -> None:
    given_up = RuntimeError("failed to store result on the backend")
    given_up.__cause__ = RedisConnectionError("refused")
    assert is_backend_away(redis_backend(), given_up)


def test_full_redis_counts_as_away_for_a_completion_backend() -> None:
    full = redis_backend()
    assert not is_backend_away(full, OutOfMemoryError("maxmemory"))
    for_completion(full)
    for_completion(full)
    assert is_backend_away(full, OutOfMemoryError("maxmemory"))
    assert not is_backend_away(full, ResponseError("too large"))
    assert full.connection_errors.count(OutOfMemoryError) == 1


def test_exceeded_deadline_counts_as_away() -> None:
    assert is_backend_away(redis_backend(), RetryDeadlineExceeded(30))
