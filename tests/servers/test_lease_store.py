"""What a lease_store does with Redis, on every redis-server that there is."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from batchery.transport.lease_store import Lease, LeaseStore
from batchery.transport.redis_schema import Keys

KEYS = Keys()
EXPIRY_S = 1.0


@pytest.fixture
def lease_store(bare: Any) -> Iterator[LeaseStore]:
    made = LeaseStore(bare, "", EXPIRY_S)
    made.open()
    yield made
    made.close()


@pytest.fixture
def other(bare: Any) -> Iterator[LeaseStore]:
    made = LeaseStore(bare, "", EXPIRY_S)
    made.open()
    yield made
    made.close()


def fetch(lease_store: LeaseStore, *messages: str) -> list[str]:
    """Pushes messages and leases them; returns their tokens."""
    lease_store.client.lpush("queue", *messages)
    fixed = [KEYS.workers, lease_store.lease_key, KEYS.token, KEYS.suspects, KEYS.waiting]
    fixed += [KEYS.running(lease_store.worker)]
    lists = ["queue", *(f"queue:t{number}" for number in range(8))]
    arguments = [lease_store.worker, 2**20, "", 1, 100, 1]
    answer = lease_store.scripts.run("fetch", [*fixed, *lists], *arguments)
    tokens = [str(answer[1] + at) for at in range(len(answer) // 2 - 1)]
    for token in tokens:
        lease_store.leases.take(token, "queue")
    return tokens


def find(lease_store: LeaseStore, token: str) -> Lease:
    lease = lease_store.leases.get(token)
    assert lease is not None
    return lease


def waiting(client: Any) -> list[str]:
    return [each.decode() for each in reversed(client.lrange("queue", 0, -1))]


def leased(lease_store: LeaseStore) -> int:
    return int(lease_store.client.hlen(lease_store.lease_key))


def test_acknowledgements_wait_for_a_redis_that_is_away(lease_store: LeaseStore) -> None:
    (token,) = fetch(lease_store, "1")
    lease_store.ack(token)
    pool, lease_store.client.connection_pool = lease_store.client.connection_pool, _nowhere()
    with pytest.raises(redis.ConnectionError):
        lease_store.flush()
    lease_store.client.connection_pool = pool
    lease_store.flush()
    assert leased(lease_store) == 0


def _nowhere() -> redis.ConnectionPool:
    return redis.ConnectionPool(host="127.0.0.1", port=1)


def test_message_acknowledged_meanwhile_is_not_redelivered(lease_store: LeaseStore) -> None:
    (token,) = fetch(lease_store, "1")
    lease_store.leases.leave([token])
    lease_store.ack(token)
    assert lease_store.reconcile() == []
    assert leased(lease_store) == 0


def test_fenced_worker_registers_anew_and_holds_nothing(lease_store: LeaseStore) -> None:
    before = lease_store.worker
    tokens = fetch(lease_store, "1", "2")
    lease_store.fenced = True
    assert not lease_store.holds(tokens[0])
    assert lease_store.rejoin() == 2
    assert lease_store.worker != before
    lease_store.ack(tokens[0])
    lease_store.flush()
    assert fetch(lease_store, "3")


def test_a_worker_that_lost_its_entry_alone_gives_its_jobs_back(lease_store: LeaseStore) -> None:
    tokens = fetch(lease_store, "1", "2", "3")
    lease_store.ack(tokens[1])
    lease_store.client.delete(KEYS.workers)
    lease_store.fenced = True
    lease_store.rejoin()
    assert waiting(lease_store.client) == ["1", "3"]


def test_after_a_flushall_tokens_go_on(lease_store: LeaseStore) -> None:
    tokens = fetch(lease_store, "1", "2")
    lease_store.client.flushall()
    lease_store.fenced = True
    lease_store.rejoin()
    assert fetch(lease_store, "3") == [str(int(tokens[-1]) + 1)]


def test_a_suspect_is_cleared_when_it_is_settled_and_only_then(lease_store: LeaseStore) -> None:
    lease_store.client.hset(KEYS.suspects, mapping={"first": 1, "second": 1})
    first, second = fetch(lease_store, "1", "2")
    for token, name in ((first, "first"), (second, "second")):
        find(lease_store, token).suspect = name
    lease_store.requeue([second], first=True)
    lease_store.ack(first)
    lease_store.flush()
    assert lease_store.client.hgetall(KEYS.suspects) == {b"second": b"1"}


def test_dedupe_keys_of_a_job_are_removed_with_its_lease(lease_store: LeaseStore) -> None:
    mine, lost = fetch(lease_store, "1", "2")
    for token in (mine, lost):
        lease_store.client.sadd(KEYS.dedupe_keys(f"tag-{token}"), "a dedupe key")
        find(lease_store, token).publish_tag = f"tag-{token}"
    lease_store.client.hdel(lease_store.lease_key, lost)
    lease_store.ack(mine)
    lease_store.ack(lost)
    lease_store.flush()
    assert not lease_store.client.exists(KEYS.dedupe_keys(f"tag-{mine}"))
    # Another worker has it, and will send what is not marked.
    assert lease_store.client.exists(KEYS.dedupe_keys(f"tag-{lost}"))
    assert leased(lease_store) == 0


def test_a_forked_child_leaves_the_leases_alone(lease_store: LeaseStore) -> None:
    tokens = fetch(lease_store, "1")
    child = os.fork()
    if child == 0:
        lease_store.requeue(tokens, first=True)
        lease_store.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert leased(lease_store) == 1
    assert waiting(lease_store.client) == []


def test_reading_of_a_suspect_is_noted_and_blamed_while_redis_is_full(
    lease_store: LeaseStore, bare: Any
) -> None:
    bare.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.OutOfMemoryError):
            bare.set("more", 1)
        lease_store.note_delivery("7")
        assert bare.hgetall(KEYS.running(lease_store.worker)) == {b"delivery": b"alone 7 7"}
        lease_store.blame_delivery("job")
        lease_store.blame_delivery("job")
        assert list(bare.hgetall(KEYS.suspects).values()) == [b"2"]
        lease_store.forget_delivery()
    finally:
        bare.config_set("maxmemory", 0)
    assert not bare.exists(KEYS.running(lease_store.worker))
