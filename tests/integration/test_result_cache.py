"""The cache of results on every Redis: what it keeps, and for how long."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from batchery_worker.result_cache import FAILURE_PAUSE_S, ResultCache
from support.harness import wait_for
from support.own_redis import OwnRedis

#: Whatever is put there is still there at the end of the test.
TTL_S = 3600

#: Makes a cache in a Redis: `make_cache(url, clock, **conf)`.
MakeCache = Callable[..., ResultCache]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    with contextlib.ExitStack() as stack:

        def make(url: str, clock: Clock | None = None, **conf: Any) -> ResultCache:
            app = Celery("cache", broker=url, backend=url, set_as_current=False)
            app.conf.update(conf)
            made = ResultCache(app.backend, clock or Clock())
            stack.callback(lambda: made._client.connection_pool.disconnect())
            return made

        yield make


def digest(number: int) -> bytes:
    return number.to_bytes(20, "big")


def results(*numbers: int) -> dict[bytes, bytes]:
    return {digest(number): b"%d" % number for number in numbers}


def test_stored_results_are_found_and_nothing_else(make_cache: MakeCache, url: str) -> None:
    cache = make_cache(url)
    many = results(*range(1000))
    for task in ("a b", "ä*?[", "x:y", "x"):
        odd = {bytes(range(20)): b'{"a": "\xc3\xa4\\u0000"}', **many}
        cache.put(task, odd, TTL_S)
        assert cache.get(task, [*odd, b"?" * 20]) == odd
    assert cache.get("y", list(many)) == {}
    assert cache.get("x", []) == {}
    assert cache.take_errors() == {}


def test_keys_begin_with_the_prefix_of_results(make_cache: MakeCache, url: str, bare: Any) -> None:
    prefix = {"global_keyprefix": "shop-"}
    cache = make_cache(url, result_backend_transport_options=prefix)
    cache.put("shout", results(1), TTL_S)
    assert bare.keys() == [b"shop-batchery:cache:shout:" + digest(1)]
    assert cache.get("shout", [digest(1)]) == results(1)
    assert make_cache(url).get("shout", [digest(1)]) == {}


def test_results_expire_and_leave_nothing_behind(
    make_cache: MakeCache, url: str, bare: Any
) -> None:
    make_cache(url).put("shout", results(1, 2), 0.05)
    wait_for(lambda: not bare.keys(), "they expire")


def test_at_maxmemory_results_are_read_and_none_is_written(
    make_cache: MakeCache, url: str, bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(url)
    cache.put("shout", results(1), TTL_S)
    bare.config_set("maxmemory", 1)
    for number in (2, 3):
        cache.put("shout", results(number), TTL_S)
        assert cache.get("shout", [digest(1), digest(number)]) == results(1)
    told = cache.take_errors()
    assert told["errors"] == 2
    assert "maxmemory" in told["error"]
    assert cache.take_errors() == {}
    assert caplog.text.count("the result cache cannot be used") == 1
    bare.config_set("maxmemory", 0)
    cache.put("shout", results(2), TTL_S)
    assert cache.get("shout", [digest(2)]) == results(2)


def test_a_value_of_somebody_else_counts_as_missing(
    make_cache: MakeCache, url: str, bare: Any
) -> None:
    cache = make_cache(url)
    bare.set(b"batchery:cache:shout:" + digest(1), '"somebody else\'s"')
    bare.lpush(b"batchery:cache:shout:" + digest(2), '"somebody else\'s"')
    assert cache.get("shout", [digest(1), digest(2)]) == {}


def test_cache_finds_nothing_while_redis_is_away_and_recovers(
    make_cache: MakeCache, every_redis: OwnRedis
) -> None:
    clock = Clock()
    cache = make_cache(every_redis.url, clock)
    cache.put("shout", results(1), TTL_S)
    every_redis.kill()
    try:
        assert cache.get("shout", [digest(1)]) == {}
        # For a while nobody even tries.
        cache.put("shout", results(2), TTL_S)
        assert cache.take_errors()["errors"] == 1
    finally:
        every_redis.start()
    clock.now_s += FAILURE_PAUSE_S
    assert cache.get("shout", [digest(1)]) == {}
    cache.put("shout", results(2), TTL_S)
    assert cache.get("shout", [digest(2)]) == results(2)
    assert cache.take_errors() == {}
