"""Results wait for a backend that is away."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from batchery_worker.patience import (
    STORE_RETRIES,
    Patience,
    RanOut,
    has_run_out,
    is_away,
    make_patient,
    patient,
)

backend: Any = Celery("patient", backend="redis://127.0.0.1:1/0", set_as_current=False).backend


def test_a_backend_tries_again_for_a_while() -> None:
    stock = SimpleNamespace(always_retry=False, max_retries=float("inf"))
    make_patient(stock)
    assert (stock.always_retry, stock.max_retries) == (True, STORE_RETRIES)


def test_what_the_app_has_set_is_kept() -> None:
    own = SimpleNamespace(always_retry=True, max_retries=3)
    make_patient(own)
    assert own.max_retries == 3


def test_a_backend_that_is_away_is_told_apart_from_one_that_refuses() -> None:
    assert is_away(backend, RedisConnectionError("refused"))
    assert not is_away(backend, ResponseError("too large"))
    assert not is_away(backend, ValueError("undecodable"))
    assert not is_away(backend, SystemExit())


def test_celery_s_own_error_is_looked_through() -> None:
    given_up = RuntimeError("failed to store result on the backend")
    given_up.__cause__ = RedisConnectionError("refused")
    assert is_away(backend, given_up)


def test_a_redis_that_is_full_is_waited_for() -> None:
    full: Any = Celery("full", backend="redis://127.0.0.1:1/0", set_as_current=False).backend
    assert not is_away(full, OutOfMemoryError("maxmemory"))
    make_patient(full)
    make_patient(full)
    assert is_away(full, OutOfMemoryError("maxmemory"))
    assert not is_away(full, ResponseError("too large"))
    assert full.connection_errors.count(OutOfMemoryError) == 1


def test_patience_begins_with_the_first_failure_and_ends() -> None:
    now_s = 100.0
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        pauses.append(pause_s)

    patience = Patience(5.0, lambda: now_s, sleep)
    now_s += 60.0
    for failures in range(1, 9):
        patience.wait(failures, "refused")
    with pytest.raises(RanOut, match="away for 5 s"):
        patience.wait(9, "refused")
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    assert patience.ran_out


def test_patience_that_ran_out_is_seen_by_its_thread_alone() -> None:
    assert not has_run_out()
    with patient(impatient := Patience(0)):
        with pytest.raises(RanOut):
            impatient.wait(1, "refused")
        assert has_run_out()
        with patient(Patience()):
            assert not has_run_out()
    assert not has_run_out()


def test_a_job_whose_patience_ran_out_is_given_back() -> None:
    assert is_away(backend, RanOut(30))
