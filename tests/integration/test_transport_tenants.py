"""Tenants of one queue take turns where their jobs wait; on every redis-server that there is."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import redis
from kombu import Connection

from batchery.queue_limits import look_into
from batchery.transport.redis_schema import Keys
from support.plain_kombu import OURS, Consumer, StartConsumer, leases, waiting

KEYS = Keys()

#: What a worker has of the queue at any time.
PREFETCH = 16


def push(client: Any, tenant: str | None, texts: Iterable[str], queue: str = "q") -> None:
    """Pushes messages as stock clients do."""
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
    for start in range(0, len(messages), 1000):
        client.lpush(queue, *messages[start : start + 1000])


def numbers(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


def complete(consumer: Consumer, count: int) -> list[str]:
    """Acknowledges what comes, as it comes, until there were so many messages; returns them."""
    for done in range(count):
        consumer.get(done + 1)
        if not consumer.messages[done].acknowledged:
            consumer.messages[done].ack()
    return consumer.texts[:count]


def of(texts: list[str], tenant: str) -> list[str]:
    return [text for text in texts if text.split()[0] == tenant]


@pytest.mark.parametrize("before", [5000, 2500])
def test_a_lone_job_goes_before_thousands_of_another_tenant(
    consume: StartConsumer, bare: Any, before: int
) -> None:
    push(bare, "bulk", numbers(before))
    push(bare, "lone", ["job"])
    push(bare, "bulk", numbers(5000 - before, before))
    # The worker has seen the first job of the second tenant among those that it took, or among the
    # newest ones. A queue that had two tenants is known to have them.
    bare.hset(KEYS.tenants, "q", 0)
    consumer = consume("q", prefetch=PREFETCH)
    texts = complete(consumer, 3 * PREFETCH)
    assert texts.index("lone job") < 3 * PREFETCH
    assert of(texts, "bulk") == [f"bulk {number}" for number in range(len(texts) - 1)]
    # Of one that comes while the worker is busy the same holds.
    push(bare, "late", ["job"])
    texts = complete(consumer, len(texts) + 2 * PREFETCH)
    assert "late job" in texts[-2 * PREFETCH :]
    assert waiting(bare) + len(consumer.messages) == 5002


def test_two_tenants_with_thousands_of_jobs_have_halves_and_keep_their_order(
    consume: StartConsumer, bare: Any
) -> None:
    push(bare, "a", numbers(2500))
    push(bare, "b", numbers(2500))
    consumer = consume("q", prefetch=PREFETCH)
    texts = complete(consumer, 1000)
    halves = Counter(text.split()[0] for text in texts)
    assert abs(halves["a"] - halves["b"]) <= 2 * PREFETCH
    for tenant in "ab":
        assert of(texts, tenant) == [f"{tenant} {at}" for at in range(halves[tenant])]


def test_monitors_see_all_that_waits_and_nothing_is_left_of_an_empty_queue(
    consume: StartConsumer, bare: Any
) -> None:
    for tenant in "abc":
        push(bare, tenant, numbers(1500))
    consumer = consume("q", prefetch=PREFETCH)
    for count in (100, 1000, 3000, 4499):
        complete(consumer, count)
        assert waiting(bare) + len(consumer.messages) == 4500
    texts = complete(consumer, 4500)
    assert sorted(texts) == sorted(f"{tenant} {at}" for tenant in "abc" for at in range(1500))
    consumer.until(lambda: leases(bare) == 0)
    assert not bare.keys("batchery:tenants:*")
    assert bare.hgetall(KEYS.tenants) == {b"q": b"0"}
    assert not bare.exists("q")


def test_jobs_of_one_tenant_or_of_none_stay_where_they_are(
    consume: StartConsumer, bare: Any
) -> None:
    for tenant, queue in ((None, "q"), ("one", "other")):
        push(bare, tenant, numbers(300), queue)
        consumer = consume(queue, prefetch=PREFETCH)
        complete(consumer, 200)
        assert not bare.keys("batchery:tenants*")
        consumer.close()


def test_what_a_worker_gives_back_goes_first(consume: StartConsumer, bare: Any) -> None:
    push(bare, "a", numbers(500))
    push(bare, "b", numbers(500))
    first = consume("q", prefetch=PREFETCH)
    complete(first, 100)
    held = first.get(len(first.messages))[100:]
    first.close()
    assert waiting(bare) == 900
    second = consume("q", prefetch=PREFETCH)
    texts = complete(second, 900)
    assert texts[: len(held)] == held
    assert len(set(texts + first.texts[:100])) == 1000


def test_a_stock_consumer_loses_nothing_and_gets_no_message_twice(
    consume: StartConsumer, bare: Any
) -> None:
    push(bare, "a", numbers(500))
    push(bare, "b", numbers(500))
    ours = consume("q", prefetch=PREFETCH)
    complete(ours, 100)
    stock = consume("q", prefetch=PREFETCH, transport="kombu.transport.redis:Transport")
    # To a stock worker a place of a job is the message of another one that has expired. It meets
    # some until a worker of ours has seen that it is there.
    for at in range(40):
        stock.get(at + 1)
        stock.messages[at].ack()
        complete(ours, 101 + at)
    theirs = [each for each in stock.messages if "expires" not in each.headers]
    assert not any("expires" in each.headers for each in stock.messages[20:])
    assert waiting(bare) + len(ours.messages) + len(theirs) == 1000
    stock.close()
    push(bare, "a", numbers(10, 500))
    texts = complete(ours, 1010 - len(theirs))
    assert sorted(texts + [each.payload for each in theirs]) == sorted(
        [f"a {at}" for at in range(510)] + [f"b {at}" for at in range(500)]
    )


def test_a_purge_removes_all_jobs(consume: StartConsumer, bare: Any, url: str) -> None:
    push(bare, "a", numbers(500))
    push(bare, "b", numbers(500))
    consumer = consume("q", prefetch=PREFETCH)
    complete(consumer, 100)
    count = waiting(bare)
    consumer.consumer.cancel()
    with Connection(url, transport=OURS) as connection:
        channel: Any = connection.default_channel
        assert channel.queue_purge("q") == count
    assert not bare.keys("batchery:tenants*")


def test_limits_count_all_jobs_and_know_the_oldest(
    consume: StartConsumer, bare: Any, url: str
) -> None:
    push(bare, "a", numbers(500))
    push(bare, "b", numbers(500))
    consumer = consume("q", prefetch=PREFETCH)
    complete(consumer, 100)
    with Connection(url, transport=OURS) as connection:
        found = look_into(connection.default_channel, "q", range(3))
    assert found is not None
    assert found.jobs == waiting(bare)
    assert found.oldest_s is not None
    assert found.oldest_s > 1e9


def test_a_full_redis_gives_jobs_in_turn(consume: StartConsumer, bare: Any) -> None:
    push(bare, "a", numbers(1500))
    push(bare, "b", numbers(1500))
    bare.config_set("maxmemory-policy", "noeviction")
    bare.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        bare.set("anything", "")
    consumer = consume("q", prefetch=PREFETCH)
    texts = complete(consumer, 3000)
    assert len(set(texts)) == 3000
    halves = Counter(text.split()[0] for text in texts[:1000])
    assert abs(halves["a"] - halves["b"]) <= 2 * PREFETCH
