"""Leases of batches, in a real Redis."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from batchery.errors import SettingsError
from batchery_producer.gateway.batches.leases import LeaseLost, Leases, leases_of
from support.harness import wait_for
from support.own_redis import OwnRedis

KEY = "batchery:batch:batch_1"


class Clock:
    """A clock that jumps."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def leases(store: Any) -> Callable[..., Leases]:
    def make(**options: Any) -> Leases:
        return Leases(store, **options)

    store.delete(KEY)
    return make


def test_one_of_two_has_the_lease(leases: Callable[..., Leases]) -> None:
    one, other = leases(lease_s=60), leases()
    held = one.take("batch_1")
    assert held is not None
    assert (held.is_held, other.take("batch_1")) == (True, None)
    held.release()
    assert not held.is_held
    with pytest.raises(LeaseLost):
        held.check()
    assert other.take("batch_1") is not None


def test_lease_lasts_as_long_as_it_is_renewed(leases: Callable[..., Leases], store: Any) -> None:
    one = leases(lease_s=60)
    held = one.take("batch_1")
    assert held is not None
    store.pexpire(KEY, 1000)
    one.renew()
    assert store.pttl(KEY) > 50_000
    assert held.is_held


def test_holder_whose_time_is_over_lets_go_for_good(
    leases: Callable[..., Leases], store: Any
) -> None:
    clock = Clock()
    one, other = leases(clock=clock), leases()
    held = one.take("batch_1")
    assert held is not None
    clock.ahead_s = 8
    assert not held.is_held
    store.delete(KEY)  # As it would have expired.
    taken = other.take("batch_1")
    assert taken is not None
    one.renew()
    assert not held.is_held
    held.release()
    # It was no longer his to give back.
    assert store.get(KEY).decode() == taken.token


def test_lease_that_another_has_is_lost_at_the_next_renewal(
    leases: Callable[..., Leases], store: Any
) -> None:
    one = leases()
    held = one.take("batch_1")
    assert held is not None
    store.set(KEY, "another")
    one.renew()
    assert not held.is_held


def test_redis_that_forgets_gives_the_lease_back_to_its_holder(own_redis: OwnRedis) -> None:
    app = Celery("leases", broker=own_redis.url, set_as_current=False)
    one, other = leases_of(app), leases_of(app)
    with one, redis.Redis.from_url(own_redis.url) as store:
        held = one.take("batch_1")
        assert held is not None
        store.flushall()
        wait_for(lambda: store.exists(KEY), "the lease is there again")
        assert (held.is_held, other.take("batch_1")) == (True, None)
        held.release()


def test_app_without_redis_has_no_leases() -> None:
    app = Celery("none", broker="memory://", backend="cache+memory://", set_as_current=False)
    with pytest.raises(SettingsError, match="need a Redis"):
        leases_of(app)
