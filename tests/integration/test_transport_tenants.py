"""Tenants of one queue take turns where their jobs wait; on every redis-server that there is."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import redis
from kombu import Connection
from kombu.exceptions import ChannelError

from batchery.queue_limits import look_into
from batchery.transport.redis_schema import find_tenant_list, lists_of
from batchery_worker.device import redis_source
from support.harness import SEP
from support.lessee import Lessee, StartLessee
from support.plain_kombu import OURS, leases

#: What a worker has of the queue at any time.
PREFETCH = 16

#: Tenants with a list of their own each.
EIGHT = [f"t{number}" for number in range(8)]


def push(client: Any, tenant: str | None, texts: Iterable[str], queue: str = "q") -> None:
    """Pushes messages into the list of a tenant."""
    headers = {} if tenant is None else {"batchery_tenant": tenant, "batchery_sent_at": 1.5}
    messages = [
        json.dumps(
            {
                "body": json.dumps(f"{tenant} {text}"),
                "content-encoding": "utf-8",
                "content-type": "application/json",
                "headers": {"id": f"{tenant}-{text}", **headers},
                "properties": {
                    "delivery_tag": f"{tenant}-{text}",
                    "delivery_info": {"exchange": "", "routing_key": queue},
                },
            }
        )
        for text in texts
    ]
    key = queue if tenant is None else find_tenant_list(queue, SEP, tenant)
    for start in range(0, len(messages), 1000):
        client.lpush(key, *messages[start : start + 1000])


def numbers(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


def complete(lessee: Lessee, count: int) -> list[str]:
    """Acknowledges what comes, as it comes, until there were so many messages; returns them."""
    for done in range(count):
        lessee.get(done + 1)
        lessee.ack(done)
    return lessee.texts[:count]


def of(texts: list[str], tenant: str) -> list[str]:
    return [text for text in texts if text.split()[0] == tenant]


@pytest.fixture
def channel(url: str) -> Any:
    with Connection(url, transport=OURS) as connection:
        yield connection.default_channel


def test_names_of_tenants_are_dealt_to_all_lists_and_always_to_the_same() -> None:
    found = Counter(find_tenant_list("q", SEP, f"tenant {number}") for number in range(800))
    assert set(found) == {f"q{SEP}t{number}" for number in range(8)}
    assert min(found.values()) > 50
    assert find_tenant_list("q", SEP, "acme") == f"q{SEP}t6"


def publish(channel: Any, tenant: Any, priority: int = 0) -> None:
    headers = {} if tenant is None else {"batchery_tenant": tenant}
    message = channel.prepare_message(f"of {tenant!a}"[:20], priority, headers=headers)
    channel.basic_publish(message, exchange="", routing_key="q")


def test_a_published_job_goes_to_its_tenant_s_list_of_its_priority(bare: Any, channel: Any) -> None:
    for tenant, priority in ((None, 0), ("acme", 0), ("acme", 3), (7, 0)):
        publish(channel, tenant, priority)
    lists = {key.decode(): bare.llen(key) for key in bare.keys("q*")}
    assert lists == {"q": 2, f"q{SEP}t6": 1, f"q{SEP}t6{SEP}3": 1}
    assert channel._size("q") == 4
    channel._delete("q", "", "", "")
    assert not bare.keys("q*")


@pytest.mark.parametrize(
    "tenant",
    ["", "x" * 100_000, "*[q]?", f"\0\r\n{SEP}3", "t3", "\udc80", "grüß", 7, [[]], {}, True],
)
def test_a_name_of_any_kind_is_in_one_of_the_lists_and_comes_to_a_worker(
    lease: StartLessee, bare: Any, channel: Any, tenant: Any
) -> None:
    publish(channel, tenant)
    (key,) = (each.decode() for each in bare.keys("q*"))
    assert key in lists_of(channel, "q", [0])
    assert (key == "q") == (not isinstance(tenant, str) or not tenant)
    lessee = lease("q", room=PREFETCH)
    lessee.until(lambda: lessee.messages)
    assert lessee.messages[0]["headers"]["batchery_tenant"] == tenant
    assert lessee.messages[0]["properties"]["delivery_info"]["routing_key"] == "q"
    # Where it goes back to is where it came from.
    lessee.close()
    assert bare.llen(key) == 1


@pytest.mark.parametrize("prefix", ["", "mine:"])
def test_without_a_lease_messages_of_all_tenants_are_seen_fetched_and_purged(
    url: str, bare: Any, prefix: str
) -> None:
    options = {"global_keyprefix": prefix}
    with Connection(url, transport=OURS, transport_options=options) as connection:
        channel: Any = connection.default_channel
        for tenant in ("acme", None, "bulk", "acme"):
            publish(channel, tenant)
        assert channel.queue_declare("q", passive=True).message_count == 4
        got = [channel.basic_get("q", no_ack=True).body for _ in range(2)]
        assert got[0] == b"of None"
        assert got[1] in (b"of 'acme'", b"of 'bulk'")
        assert channel.queue_purge("q") == 2
        assert channel.basic_get("q") is None
        with pytest.raises(ChannelError, match="no queue 'q'"):
            channel.queue_declare("q", passive=True)
    assert not bare.keys(f"{prefix}q*")


@pytest.mark.parametrize("prefetch", [1, PREFETCH])
def test_a_lone_job_goes_before_thousands_of_another_tenant(
    lease: StartLessee, bare: Any, prefetch: int
) -> None:
    push(bare, "bulk", numbers(3000))
    push(bare, "acme", ["job"])
    lessee = lease("q", room=prefetch)
    texts = complete(lessee, 3 * prefetch)
    assert "acme job" in texts
    assert of(texts, "bulk") == [f"bulk {number}" for number in range(len(texts) - 1)]
    # Of one that comes while the worker is busy the same holds, and of one without a tenant.
    for tenant in ("acme", None):
        push(bare, tenant, ["late"])
        texts = complete(lessee, len(texts) + 4 * prefetch)
        assert f"{tenant} late" in texts[-4 * prefetch :]


def test_all_lists_have_their_turn_in_each_of_two_queues_where_few_jobs_are_taken(
    lease: StartLessee, bare: Any
) -> None:
    queues = ("q", "other")
    for queue in queues:
        for tenant in (None, *EIGHT):
            push(bare, tenant, [f"{queue} {at}" for at in range(100)], queue)
    texts = complete(lease(*queues, room=2), 600)
    taken = Counter(tuple(text.split()[:2]) for text in texts)
    assert min(taken[str(tenant), queue] for tenant in (None, *EIGHT) for queue in queues) > 10


def test_monitors_see_all_that_waits_and_nothing_is_left_of_an_empty_queue(
    lease: StartLessee, bare: Any, channel: Any
) -> None:
    for tenant in (None, "a", "b"):
        push(bare, tenant, numbers(500))
    lessee = lease("q", room=PREFETCH)
    for count in (100, 1000, 1499):
        complete(lessee, count)
        found = look_into(channel, "q", range(3))
        assert found is not None
        assert found.jobs == channel._size("q") == 1500 - len(lessee.messages)
    texts = complete(lessee, 1500)
    assert sorted(texts) == sorted(f"{each} {at}" for each in (None, "a", "b") for at in range(500))
    lessee.until(lambda: leases(bare) == 0)
    assert not bare.exists(*lists_of(channel, "q"))


def test_limits_know_the_oldest_job_of_any_tenant(bare: Any, channel: Any) -> None:
    push(bare, None, ["0"])
    push(bare, "acme", ["0"])
    found = look_into(channel, "q", range(3))
    assert found is not None
    assert found.oldest_s is not None
    assert found.oldest_s > 1e9


def test_a_job_of_a_tenant_wakes_a_device_that_waits(
    lease: StartLessee, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or its look at all queues, once a second, would find the job.
    monkeypatch.setattr(redis_source, "SWEEP_INTERVAL_S", 600.0)
    lessee = lease("q", room=PREFETCH)
    lessee.until_waiting()
    push(bare, "acme", ["0"])
    lessee.turn(600.0)
    assert lessee.get(1) == ["acme 0"]


def test_what_a_worker_gives_back_goes_first_of_its_tenant(
    lease: StartLessee, bare: Any, channel: Any
) -> None:
    for tenant in ("acme", "bulk"):
        push(bare, tenant, numbers(200))
    first = lease("q", room=PREFETCH)
    complete(first, 100)
    held = first.get(len(first.messages))[100:]
    first.close()
    assert channel._size("q") == 300
    second = lease("q", room=PREFETCH)
    texts = complete(second, 300)
    for tenant in ("acme", "bulk"):
        own = of(held, tenant)
        assert of(texts, tenant)[: len(own)] == own
    assert len(set(texts + first.texts[:100])) == 400


def test_a_full_redis_gives_jobs_in_turn_and_can_be_purged(
    lease: StartLessee, bare: Any, channel: Any
) -> None:
    for tenant in ("acme", "bulk"):
        push(bare, tenant, numbers(500))
        push(bare, tenant, numbers(5), "other")
    bare.config_set("maxmemory-policy", "noeviction")
    bare.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        bare.set("anything", "")
    assert channel.queue_purge("other") == 10
    texts = complete(lease("q", room=PREFETCH), 1000)
    assert len(set(texts)) == 1000
    halves = Counter(text.split()[0] for text in texts[:300])
    assert abs(halves["acme"] - halves["bulk"]) <= 2 * PREFETCH
