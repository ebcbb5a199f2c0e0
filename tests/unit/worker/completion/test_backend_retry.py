"""Which errors of a result backend mean that it is away."""

from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from batchery.completion import JobCompletion, completing
from batchery_worker.completion.backend import BackendAway, for_completion, outage_told_apart


def redis_backend() -> Any:
    return Celery("away", backend="redis://127.0.0.1:1/0", set_as_current=False).backend


def is_told_apart(backend: Any, error: BaseException) -> bool:
    with (
        pytest.raises(BaseException) as caught,  # noqa: PT011
        completing(JobCompletion()),
        outage_told_apart(backend),
    ):
        raise error
    return caught.type is BackendAway


def test_backend_that_is_away_is_told_apart_from_one_that_refuses() -> None:
    backend = redis_backend()
    assert is_told_apart(backend, RedisConnectionError("refused"))
    assert not is_told_apart(backend, ResponseError("too large"))
    assert not is_told_apart(backend, ValueError("undecodable"))
    assert not is_told_apart(backend, SystemExit())


def test_key_that_a_message_lacks_is_no_outage() -> None:
    assert redis_backend().exception_safe_to_retry(KeyError("chord_size"))
    assert not is_told_apart(redis_backend(), KeyError("chord_size"))


def test_cause_of_celerys_own_error_counts_and_of_no_other() -> None:
    for error, is_away in (
        (BackendStoreError("given up"), True),
        (ValueError("undecodable"), False),
    ):
        error.__cause__ = RedisConnectionError("refused")
        assert is_told_apart(redis_backend(), error) is is_away


def test_backend_tells_of_its_outage_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = for_completion(redis_backend())

    def refuse(*_: Any, **__: Any) -> None:
        raise BackendStoreError("given up") from RedisConnectionError("refused")

    monkeypatch.setattr(RedisBackend, "store_result", refuse)
    for store in (backend.mark_as_done, backend.mark_as_failure, backend.mark_as_retry):
        with completing(JobCompletion()), pytest.raises(BackendAway, match="given up"):
            store("id", None)
        # A hook's own calls fail as they do without us.
        with pytest.raises(BackendStoreError, match="given up"):
            store("id", None)

    def cut_off(*_: Any, **__: Any) -> None:
        raise RedisConnectionError("refused")

    monkeypatch.setattr(RedisBackend, "on_chord_part_return", cut_off)
    with completing(JobCompletion()), pytest.raises(BackendAway, match="refused"):
        backend.on_chord_part_return(None, "SUCCESS", None)
