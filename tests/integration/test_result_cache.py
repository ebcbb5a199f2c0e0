"""The cache of results on every Redis: what it keeps, for how long, and how much of it."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from batchery_worker.ipc.messages import CachePolicy
from batchery_worker.result_cache import (
    CHECKSUM_BYTES,
    FAILURE_PAUSE_S,
    OVERHEAD_BYTES,
    ResultCache,
)
from support.harness import wait_for
from support.own_redis import OwnRedis

#: Whatever is put there is still there at the end of the test.
POLICY = CachePolicy("1", 3600, 10**9)

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


def results(*numbers: int, size: int = 10) -> dict[bytes, bytes]:
    return {digest(number): b"%*d" % (size, number) for number in numbers}


def test_stored_results_are_found_and_nothing_else(make_cache: MakeCache, url: str) -> None:
    cache = make_cache(url)
    assert cache.put("shout", results(1, 2), POLICY) == {
        "bytes": 2 * (10 + CHECKSUM_BYTES + OVERHEAD_BYTES),
        "results": 2,
        "evicted": 0,
    }
    assert cache.get("shout", [digest(2), digest(3)]) == results(2)
    assert cache.get("embed", [digest(2)]) == {}
    assert cache.get("shout", []) == {}
    assert cache.take_errors() == {}


def test_any_bytes_and_any_task_name_will_do(make_cache: MakeCache, url: str) -> None:
    cache = make_cache(url)
    for number, task in enumerate(["a b", "ä*?[", "x:y", "x"]):
        odd = {bytes(range(number, number + 20)): b'{"a": "\xc3\xa4\\u0000"}'}
        cache.put(task, odd, POLICY)
        assert cache.get(task, list(odd)) == odd


def test_keys_begin_with_the_prefix_of_results(make_cache: MakeCache, url: str, bare: Any) -> None:
    prefix = {"global_keyprefix": "shop-"}
    cache = make_cache(url, result_backend_transport_options=prefix)
    cache.put("shout", results(1), POLICY)
    assert sorted(bare.keys()) == [
        b"shop-batchery:cache-ages:shout",
        b"shop-batchery:cache-sizes:shout",
        b"shop-batchery:cache:shout:" + digest(1),
    ]
    assert cache.get("shout", [digest(1)]) == results(1)
    assert make_cache(url).get("shout", [digest(1)]) == {}


def test_results_expire_and_leave_nothing_behind(
    make_cache: MakeCache, url: str, bare: Any
) -> None:
    cache = make_cache(url)
    cache.put("shout", results(1, 2), POLICY._replace(ttl_s=0.05))
    wait_for(lambda: not cache.get("shout", [digest(1), digest(2)]), "they expire")
    wait_for(lambda: not bare.keys(), "so does everything beside them")


def test_oldest_results_are_evicted_when_the_cache_is_full(
    make_cache: MakeCache, url: str, bare: Any
) -> None:
    cache = make_cache(url)
    room = POLICY._replace(max_bytes=10 * (100 + CHECKSUM_BYTES + OVERHEAD_BYTES))
    for number in range(10):
        cache.put("shout", results(number, size=100), room)
    told = cache.put("shout", results(10, 11, size=100), room)
    assert told == {"bytes": room.max_bytes, "results": 10, "evicted": 2}
    found = cache.get("shout", [digest(number) for number in range(12)])
    assert len(found) == 10
    assert set(found) >= set(results(10, 11))
    assert bare.hget("batchery:cache-sizes:shout", "total") == b"%d" % room.max_bytes
    # Another task has room of its own.
    assert cache.put("embed", results(1), room)["results"] == 1
    assert len(cache.get("shout", [digest(number) for number in range(12)])) == 10


def test_at_maxmemory_results_are_read_and_none_is_written(
    make_cache: MakeCache, url: str, bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    cache = make_cache(url, clock)
    cache.put("shout", results(1), POLICY)
    before = sorted(bare.keys())
    bare.config_set("maxmemory", 1)
    with caplog.at_level(logging.WARNING):
        assert cache.put("shout", results(2), POLICY) == {}
        assert cache.get("shout", [digest(1)]) == results(1)
        # For a while nobody even tries.
        bare.config_set("maxmemory", 0)
        assert cache.put("shout", results(2), POLICY) == {}
    told = cache.take_errors()
    assert told["errors"] == 1
    assert told["error"].startswith("cannot be written: ")
    assert cache.take_errors() == {}
    assert sorted(bare.keys()) == before
    assert caplog.text.count("the result cache cannot be written") == 1
    clock.now_s += FAILURE_PAUSE_S
    assert cache.put("shout", results(2), POLICY)["results"] == 2


def test_key_of_another_type_counts_as_no_cache(make_cache: MakeCache, url: str, bare: Any) -> None:
    cache = make_cache(url)
    bare.set("batchery:cache-ages:shout", "somebody else's")
    assert cache.put("shout", results(1), POLICY) == {}
    assert "WRONGTYPE" in cache.take_errors()["error"]
    bare.lpush(b"batchery:cache:shout:" + digest(2), "somebody else's")
    assert cache.get("shout", [digest(2)]) == {}


def test_cache_finds_nothing_while_redis_is_away_and_recovers(
    make_cache: MakeCache, every_redis: OwnRedis
) -> None:
    clock = Clock()
    cache = make_cache(every_redis.url, clock)
    cache.put("shout", results(1), POLICY)
    every_redis.kill()
    try:
        assert cache.get("shout", [digest(1)]) == {}
        assert cache.put("shout", results(2), POLICY) == {}
        told = cache.take_errors()
        assert told["errors"] == 2
    finally:
        every_redis.start()
    clock.now_s += FAILURE_PAUSE_S
    assert cache.get("shout", [digest(1)]) == {}
    assert cache.put("shout", results(2), POLICY)["results"] == 1
    assert cache.get("shout", [digest(2)]) == results(2)
    assert cache.take_errors() == {}
