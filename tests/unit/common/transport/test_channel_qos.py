"""Which messages count against the prefetch of a channel, and how they are settled."""

from collections.abc import Collection
from typing import Any

import pytest
import redis

from batchery.transport import channel as module


class Counting:
    """A channel for a real QoS."""

    def __init__(self) -> None:
        self.lease_store: Any = Owned()
        self.is_broken = False
        self.rooms = 0

    def make_room(self) -> None:
        self.rooms += 1


class Owned:
    """Leases, as a QoS ends them."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.requeued: list[tuple[list[str], bool]] = []
        self.abandoned = 0
        self.owned: list[str] = []

    @property
    def leases(self) -> "Owned":
        return self

    def ack(self, tag: str) -> None:
        self.acknowledged.append(tag)

    def requeue(self, tags: Collection[str], *, first: bool) -> None:
        self.requeued.append((list(tags), first))

    def abandon(self, _: Any) -> None:
        self.abandoned += 1

    def owned_by(self, _: Any) -> list[str]:
        return self.owned


@pytest.fixture
def qos(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Kombu gives back what it counts by commands of its own.
    stock: list[str] = []
    for name in ("ack", "append", "restore_unacked", "restore_visible"):
        monkeypatch.setattr(
            f"kombu.transport.redis.QoS.{name}",
            lambda *_, name=name, **__: stock.append(name),
        )
    monkeypatch.setattr("kombu.transport.redis.QoS.reject", lambda *_, **__: stock.append("reject"))
    made: Any = module.QoS(Counting(), 3)
    made._on_collect.cancel()
    made.stock = stock
    return made


def test_room_is_what_the_prefetch_leaves(qos: Any) -> None:
    assert qos.free == 3
    for tag in ("1", "2"):
        qos.append(None, tag)
    assert qos.free == 1
    qos.forget("1")
    assert (qos.free, qos.channel.rooms) == (2, 1)
    # What was never counted makes no room, but may have been waited for.
    qos.forget("9")
    assert (qos.free, qos.channel.rooms) == (2, 2)
    for tag in "3456":
        qos.adopt(tag)
    assert qos.free == 0
    qos.prefetch_count = 0
    assert qos.free == module.MAX_UNLIMITED_FETCH
    # Celery's `worker_disable_prefetch`.
    qos.can_consume = lambda: False
    assert qos.free == 1


def test_leased_messages_are_settled_by_their_leases(qos: Any) -> None:
    store = qos.channel.lease_store
    qos.ack("1")
    qos.reject("2")
    qos.reject("3", requeue=True)
    assert store.acknowledged == ["1", "2"]
    assert store.requeued == [(["3"], False)]
    assert qos.stock == []


def test_messages_that_came_another_way_are_kombu_s(qos: Any) -> None:
    qos.ack("a-uuid")
    qos.reject("a-uuid", requeue=True)
    qos.append(None, "a-uuid")
    qos.channel.lease_store = None
    qos.ack("1")
    assert qos.stock == ["ack", "reject", "append", "ack"]


def test_channel_gives_back_what_it_counts_unless_its_connection_broke(qos: Any) -> None:
    store = qos.channel.lease_store
    qos.adopt("1")
    store.owned = ["1"]
    qos._delivered["a-uuid"] = None
    qos.restore_unacked()
    assert store.requeued == [(["1"], True)]
    # Kombu gives back its own.
    assert list(qos._delivered) == ["a-uuid"]
    qos.adopt("2")
    qos.channel.is_broken = True
    qos.restore_unacked()
    assert (len(store.requeued), store.abandoned) == (1, 1)
    assert list(qos._delivered) == ["a-uuid"]


def test_closing_channel_gives_back_although_kombu_would_not(qos: Any) -> None:
    store = qos.channel.lease_store
    qos.channel.do_restore = False
    store.owned = ["1"]
    qos.restore_unacked_once()
    assert store.requeued == [(["1"], True)]
    qos.channel.lease_store = None
    qos.restore_unacked_once()
    assert qos.stock == ["restore_unacked"]


def test_channel_that_counts_nothing_gives_nothing_back(qos: Any) -> None:
    qos.restore_unacked()
    qos.channel.lease_store = None
    qos.restore_unacked()
    assert qos.stock == ["restore_unacked"] * 2


def test_full_redis_does_not_end_a_worker_that_looks_for_old_messages(
    qos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise redis.OutOfMemoryError("OOM")

    monkeypatch.setattr("kombu.transport.redis.QoS.restore_visible", refuse)
    qos.restore_visible()
