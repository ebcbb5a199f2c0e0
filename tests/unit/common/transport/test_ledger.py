"""What a ledger does with Redis, on every redis-server that there is."""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from batchery.errors import RedisUnavailable
from batchery.transport.heart import Heart
from batchery.transport.keys import Keys
from batchery.transport.ledger import Ledger
from batchery.transport.ledgers import lend, retire
from batchery.transport.server import refuse_unfit
from harness import wait_for
from own_redis import OwnRedis

KEYS = Keys()
EXPIRY_S = 1.0


class Owner:
    """What a QoS is to a ledger."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.adopted: list[str] = []

    def forget(self, token: str) -> None:
        self.forgotten.append(token)

    def adopt(self, token: str) -> None:
        self.adopted.append(token)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def ledger(bare: Any) -> Iterator[Ledger]:
    made = Ledger(bare, "", EXPIRY_S)
    made.open()
    yield made
    made.close()


@pytest.fixture
def other(bare: Any) -> Iterator[Ledger]:
    made = Ledger(bare, "", EXPIRY_S)
    made.open()
    yield made
    made.close()


def drain(ledger: Ledger, owner: Any, *messages: str) -> list[str]:
    """Pushes messages and leases them; returns their tokens."""
    ledger.client.lpush("queue", *messages)
    keys = [KEYS.workers, ledger.lease_key, KEYS.token, KEYS.suspects, "queue"]
    answer = ledger.scripts.run("drain", keys, ledger.worker, 100, 2**20, 1, 100)
    tokens = [str(answer[1] + at) for at in range(len(answer) // 2 - 1)]
    if owner is not None:
        for token in tokens:
            ledger.take(token, owner, "queue")
    return tokens


def waiting(client: Any) -> list[str]:
    return [each.decode() for each in reversed(client.lrange("queue", 0, -1))]


def leased(ledger: Ledger) -> int:
    return int(ledger.client.hlen(ledger.lease_key))


def test_acknowledgements_go_together(ledger: Ledger, owner: Owner) -> None:
    tokens = drain(ledger, owner, "1", "2", "3")
    for token in tokens[:2]:
        ledger.ack(token)
    assert leased(ledger) == 3
    assert owner.forgotten == tokens[:2]
    assert not ledger.holds(tokens[0])
    assert ledger.holds(tokens[2])
    ledger.flush()
    assert leased(ledger) == 1


def test_all_that_waits_is_sent(ledger: Ledger, owner: Owner) -> None:
    for _ in range(30):
        for token in drain(ledger, owner, *["x"] * 100):
            ledger.ack(token)
    assert leased(ledger) == 3000
    ledger.flush()
    assert leased(ledger) == 0


def test_what_nobody_holds_cannot_be_acknowledged(ledger: Ledger, owner: Owner) -> None:
    (token,) = drain(ledger, owner, "1")
    ledger.ack(token)
    ledger.ack(token)
    ledger.flush()
    assert owner.forgotten == [token]


def test_acknowledgements_wait_for_a_redis_that_is_away(ledger: Ledger, owner: Owner) -> None:
    (token,) = drain(ledger, owner, "1")
    ledger.ack(token)
    pool, ledger.client.connection_pool = ledger.client.connection_pool, _nowhere()
    with pytest.raises(redis.ConnectionError):
        ledger.flush()
    ledger.client.connection_pool = pool
    ledger.flush()
    assert leased(ledger) == 0


def _nowhere() -> redis.ConnectionPool:
    return redis.ConnectionPool(host="127.0.0.1", port=1)


def test_threads_that_flush_at_the_same_time_lose_nothing(ledger: Ledger, owner: Owner) -> None:
    tokens = [token for _ in range(20) for token in drain(ledger, owner, *["x"] * 100)]

    def acknowledge(part: list[str]) -> None:
        for token in part:
            ledger.ack(token)

    def flush() -> None:
        for _ in range(20):
            ledger.flush()

    threads = [threading.Thread(target=acknowledge, args=(tokens[at::2],)) for at in (0, 1)]
    threads += [threading.Thread(target=flush) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.flush()
    assert leased(ledger) == 0
    assert sorted(owner.forgotten, key=int) == tokens


def test_requeue_to_either_end(ledger: Ledger, owner: Owner) -> None:
    tokens = drain(ledger, owner, "1", "2", "3")
    ledger.client.lpush("queue", "4")
    ledger.requeue(tokens[1:], first=True)
    ledger.requeue(tokens[:1], first=False)
    assert waiting(ledger.client) == ["2", "3", "4", "1"]
    assert not ledger.holds(tokens[0])


def test_close_gives_everything_back_in_order(bare: Any, owner: Owner) -> None:
    ledger = Ledger(bare, "", EXPIRY_S)
    ledger.open()
    tokens = drain(ledger, owner, "1", "2", "3", "4")
    bare.lpush("queue", "5")
    ledger.ack(tokens[1])
    ledger.close()
    ledger.close()
    assert waiting(bare) == ["1", "3", "4", "5"]
    assert not bare.zcard(KEYS.workers)
    assert not bare.hlen(KEYS.worker_info)


def test_reconcile_adopts_what_a_lost_answer_brought(ledger: Ledger, owner: Owner) -> None:
    known = drain(ledger, owner, "1")
    lost = drain(ledger, None, "2", "3")
    again = ledger.reconcile(owner, active=[])
    assert again == [(lost[0], "queue", b"2"), (lost[1], "queue", b"3")]
    assert ledger.holds(known[0])


def test_reconcile_brings_what_waits_and_counts_what_runs(ledger: Ledger, owner: Owner) -> None:
    waits, runs, done = drain(ledger, owner, "waits", "runs", "done")
    ledger.leases.abandon(owner)
    ledger.client.hdel(ledger.lease_key, done)
    after = Owner()
    assert ledger.reconcile(after, active=[runs]) == [(waits, "queue", b"waits")]
    assert after.adopted == [runs]
    assert not ledger.holds(done)
    # Of the channel before, whose request still has the message.
    ledger.ack(runs)
    assert after.forgotten == [runs]
    assert owner.forgotten == []


def test_what_was_acknowledged_meanwhile_does_not_come_again(ledger: Ledger, owner: Owner) -> None:
    (token,) = drain(ledger, owner, "1")
    ledger.leases.abandon(owner)
    ledger.ack(token)
    assert ledger.reconcile(Owner(), active=[]) == []
    assert leased(ledger) == 0


def test_tokens_do_not_come_twice_after_redis_forgot_the_last(ledger: Ledger, owner: Owner) -> None:
    drain(ledger, owner, "1", "2", "3")
    ledger.client.set(KEYS.token, 1)
    ledger.reconcile(owner, active=[])
    assert drain(ledger, owner, "4") == ["4"]


def test_a_fenced_worker_enters_anew_and_holds_nothing(ledger: Ledger, owner: Owner) -> None:
    before = ledger.worker
    tokens = drain(ledger, owner, "1", "2")
    ledger.fenced = True
    assert not ledger.holds(tokens[0])
    assert ledger.rejoin() == 2
    assert ledger.worker != before
    ledger.ack(tokens[0])
    ledger.flush()
    assert drain(ledger, owner, "3")


def test_a_worker_finds_out_that_others_took_over(ledger: Ledger, other: Ledger) -> None:
    heart = Heart(ledger, ledger.client)
    heart.beat(0.0)
    assert not ledger.fenced
    ledger.client.zrem(KEYS.workers, ledger.worker)
    heart.beat(1.0)
    assert ledger.fenced


def test_a_worker_that_lost_its_entry_alone_gives_its_jobs_back(
    ledger: Ledger, owner: Owner
) -> None:
    tokens = drain(ledger, owner, "1", "2", "3")
    ledger.ack(tokens[1])
    ledger.client.delete(KEYS.workers)
    ledger.fenced = True
    ledger.rejoin()
    assert waiting(ledger.client) == ["1", "3"]


def test_after_a_flushall_tokens_go_on(ledger: Ledger, owner: Owner) -> None:
    tokens = drain(ledger, owner, "1", "2")
    ledger.client.flushall()
    ledger.fenced = True
    ledger.rejoin()
    assert drain(ledger, owner, "3") == [str(int(tokens[-1]) + 1)]


def test_the_jobs_of_a_silent_worker_go_back(ledger: Ledger, other: Ledger, owner: Owner) -> None:
    drain(other, owner, "1", "2")
    other.began({"1": "job"}, alone=True)
    wait_for(lambda: other.client.exists(KEYS.running(other.worker)), "the note arrives")
    heart = Heart(ledger, ledger.client)
    for tenths in range(10):
        heart.beat(tenths / 10)
        assert waiting(ledger.client) == []
    heart.beat(1.0)
    assert waiting(ledger.client) == ["1", "2"]
    assert ledger.client.hgetall(KEYS.suspects) == {b"job": b"1"}


@pytest.mark.parametrize(("said", "after_s"), [(2.0, 2.0), (0.5, 0.5), ("soon", 1.0), (-1, 1.0)])
def test_a_silent_worker_is_judged_by_the_expiry_that_it_told(
    ledger: Ledger, other: Ledger, owner: Owner, said: object, after_s: float
) -> None:
    drain(other, owner, "1")
    ledger.client.hset(KEYS.worker_info, other.worker, json.dumps({"expiry_s": said}))
    heart = Heart(ledger, ledger.client)
    tenths = 0
    while not waiting(ledger.client):
        heart.beat(tenths / 10)
        tenths += 1
    assert (tenths - 1) / 10 == after_s


def test_deaths_right_after_an_outage_are_not_counted(
    ledger: Ledger, other: Ledger, owner: Owner
) -> None:
    drain(other, owner, "1")
    other.began({"1": "job"}, alone=True)
    wait_for(lambda: other.client.exists(KEYS.running(other.worker)), "the note arrives")
    heart = Heart(ledger, ledger.client)
    heart.beat(0.0)
    heart._observer.interrupted()
    for tenths in range(1, 12):
        heart.beat(tenths / 10)
    assert waiting(ledger.client) == ["1"]
    assert ledger.client.hgetall(KEYS.suspects) == {}


def test_a_suspect_is_cleared_when_it_is_settled_and_only_then(
    ledger: Ledger, owner: Owner
) -> None:
    ledger.client.hset(KEYS.suspects, mapping={"first": 1, "second": 1})
    first, second = drain(ledger, owner, "1", "2")
    ledger.suspect(first, "first", 1)
    ledger.suspect(second, "second", 1)
    assert ledger.deaths(first) == 1
    ledger.requeue([second], first=True)
    ledger.ack(first)
    ledger.flush()
    assert ledger.client.hgetall(KEYS.suspects) == {b"second": b"1"}


def test_marks_of_what_a_job_has_sent_go_with_its_lease_and_only_then(
    ledger: Ledger, owner: Owner
) -> None:
    mine, lost = drain(ledger, owner, "1", "2")
    for token in (mine, lost):
        ledger.client.sadd(KEYS.sent(f"tag-{token}"), "mark")
        ledger.sent(token, f"tag-{token}")
    ledger.client.hdel(ledger.lease_key, lost)
    ledger.ack(mine)
    ledger.ack(lost)
    ledger.flush()
    assert not ledger.client.exists(KEYS.sent(f"tag-{mine}"))
    # Another worker has it, and will send what is not marked.
    assert ledger.client.exists(KEYS.sent(f"tag-{lost}"))
    assert leased(ledger) == 0


def test_who_is_cleared_during_a_flush_is_told_with_the_next(
    ledger: Ledger, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.client.hset(KEYS.suspects, mapping={"first": 0, "second": 0})
    tokens = drain(ledger, owner, "1", "2")
    for token, suspect in zip(tokens, ("first", "second"), strict=True):
        ledger.suspect(token, suspect, 0)
    ledger.settled(tokens[:1])
    stock = ledger.client.pipeline

    def held_up(**options: bool) -> Any:
        pipe = stock(**options)
        execute = pipe.execute

        def meanwhile(**more: bool) -> Any:
            # On the event loop's thread, while the heart's waits for Redis.
            taken = ledger._notes.take_cleared()
            ledger.settled(tokens[1:])
            assert taken == []
            return execute(**more)

        monkeypatch.setattr(pipe, "execute", meanwhile)
        return pipe

    monkeypatch.setattr(ledger.client, "pipeline", held_up)
    ledger._flush_some()
    monkeypatch.undo()
    ledger.flush()
    assert ledger.client.hgetall(KEYS.suspects) == {}


def test_still_held(ledger: Ledger, owner: Owner) -> None:
    tokens = drain(ledger, owner, "1", "2")
    ledger.client.hdel(ledger.lease_key, tokens[0])
    assert ledger.still_held(tokens) == {tokens[1]}


def test_a_forked_child_leaves_the_leases_alone(ledger: Ledger, owner: Owner) -> None:
    tokens = drain(ledger, owner, "1")
    child = os.fork()
    if child == 0:
        ledger.requeue(tokens, first=True)
        ledger.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert leased(ledger) == 1
    assert waiting(ledger.client) == []


def test_two_channels_have_two_ledgers_and_the_next_has_what_one_left(
    every_redis: OwnRedis,
) -> None:
    def make() -> Ledger:
        return Ledger(redis.Redis.from_url(every_redis.url), "", EXPIRY_S)

    first, second = (lend(("here", os.getpid()), channel, make) for channel in ("a", "b"))
    assert first is not second
    first.holder = None
    assert lend(("here", os.getpid()), "c", make) is first
    retire(first)
    assert lend(("here", os.getpid()), "d", make) is not first


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"redis_version": "6.0.16"}, "is Redis 6.0.16"),
        ({"redis_version": "7.0.15", "redis_mode": "cluster"}, "is a Redis Cluster"),
    ],
)
def test_a_redis_that_is_not_fit_is_refused(info: dict[str, str], words: str) -> None:
    with pytest.raises(RedisUnavailable, match=words):
        refuse_unfit(info)


def test_a_redis_that_evicts_is_warned_of(bare: Any, caplog: pytest.LogCaptureFixture) -> None:
    bare.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ledger = Ledger(bare, "", EXPIRY_S)
        ledger.open()
        ledger.close()
    finally:
        bare.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in caplog.text
