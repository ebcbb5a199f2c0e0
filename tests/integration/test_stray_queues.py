"""Queues that nobody knows are found by their bindings, whoever sent to them."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from batchery.cli import stray_queues
from batchery.cli.stray_queues import StrayQueues
from support.own_redis import OwnRedis


@pytest.fixture
def store(own_redis: OwnRedis) -> Iterator[Any]:
    with Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture(params=["", "shop[1]:"], ids=["plain", "prefix"])
def sender(request: pytest.FixtureRequest, own_redis: OwnRedis) -> Iterator[Celery]:
    """A client of plain Celery."""
    with Celery(broker=own_redis.url, set_as_current=False) as made:
        made.conf.broker_transport_options = {"global_keyprefix": request.param}
        yield made


def test_jobs_of_a_misspelt_queue_are_found_and_those_of_known_queues_are_none(
    sender: Celery,
) -> None:
    strays = StrayQueues(sender)
    assert strays.look(()) == {}
    for priority in (0, 9):
        sender.send_task("embed", ["a"], queue="embde", priority=priority)
    sender.send_task("embed", ["a"], queue="embed")
    assert strays.look(["embed"]) == {"embde": 2}
    assert sender.control.purge() == 0
    with sender.connection_for_write() as connection:
        connection.SimpleQueue("embde").clear()
    assert strays.look(["embed"]) == {}


def test_a_look_goes_on_where_the_last_one_ended(
    sender: Celery, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stray_queues, "SCAN_KEYS", 10)
    store.mset({f"celery-task-meta-{number}": "{}" for number in range(500)})
    sender.send_task("embed", ["a"], queue="embde")
    strays = StrayQueues(sender)
    looks = [bool(strays.look((), calls=1)) for _ in range(200)]
    # What was found is not forgotten meanwhile.
    assert looks == sorted(looks)
    assert looks[-1]
    assert StrayQueues(sender).look((), calls=200) == {"embde": 1}


def test_keys_of_others_and_odd_names_are_passed_over(sender: Celery, store: Any) -> None:
    sender.send_task("embed", ["a"], queue="embde")
    with sender.connection_for_read() as connection:
        channel: Any = connection.default_channel
        prefix = channel.global_keyprefix
    store.set(f"{prefix}_kombu.binding.text", "no set")
    for name in (b"a\x1b[31mb", b"x" * 101, b"\xff", b"", b"text"):
        store.sadd(f"{prefix}_kombu.binding.odd", b"\x06\x16\x06\x16".join((b"", b"", name)))
        store.lpush(prefix.encode() + (name or b"none"), "a")
    store.delete(f"{prefix}text")
    store.set(f"{prefix}text", "no list")
    assert StrayQueues(sender).look(()) == {"embde": 1}


def test_user_who_may_not_scan_asks_once(own_redis: OwnRedis, store: Any) -> None:
    store.acl_setuser("app", enabled=True, nopass=True, commands=["+@all", "-scan"], keys=["*"])
    url = own_redis.url.replace("redis://", "redis://app:any@")
    with Celery(broker=url, set_as_current=False) as made:
        strays = StrayQueues(made)
        assert strays.look(()) == strays.look(()) == {}
    [entry] = store.acl_log()
    assert (entry["object"], entry["count"]) == ("scan", 1)
