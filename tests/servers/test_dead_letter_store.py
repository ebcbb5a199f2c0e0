"""Dead letters in Redis, and what can be read of a message that is broken."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from batchery.transport.dead_letters import (
    MAX_TOKENS_PER_COMMAND,
    DeadLetters,
    describe,
)
from batchery.transport.lease_store import LeaseStore
from batchery.transport.suspects import Deaths
from support.harness import wait_for

PREFIX = "shop:"


@pytest.fixture
def lease_store(bare: Any) -> Iterator[LeaseStore]:
    made = LeaseStore(bare, PREFIX, expiry_s=5.0)
    made.open()
    yield made
    made.close()


@pytest.fixture
def letters(bare: Any) -> DeadLetters:
    return DeadLetters(bare, PREFIX)


def hold(lease_store: LeaseStore, token: int, message: bytes, key: str = "shop:embed") -> str:
    """Lets a lease_store have a lease."""
    lease_store.client.hset(lease_store.lease_key, token, key.encode() + b"\0" + message)
    lease_store.leases.take(str(token), key)
    return str(token)


def bury(
    lease_store: LeaseStore, token: int, message: bytes = b"{}", key: str = "shop:embed"
) -> str:
    held = hold(lease_store, token, message, key)
    assert lease_store.dead_letter(held, describe("it is broken", f"id-{token}", "embed"))
    return held


def test_dead_letter_has_its_description_and_its_message(
    lease_store: LeaseStore, letters: DeadLetters
) -> None:
    bury(lease_store, 7, b"\xff\0raw", "shop:embed\x06\x169")
    found = letters.get("7")
    assert found is not None
    letter, message = found
    assert message == b"\xff\0raw"
    assert (letter.token, letter.id, letter.task) == ("7", "id-7", "embed")
    assert (letter.queue, letter.reason) == ("embed", "it is broken")
    assert letter.died_s > 1.7e9
    assert letters.get("8") is None


def test_dead_letters_are_listed_oldest_first(
    lease_store: LeaseStore, letters: DeadLetters
) -> None:
    for token in (100, 9, 20):
        bury(lease_store, token)
    assert [letter.token for letter in letters] == ["9", "20", "100"]
    assert letters.tokens() == ["9", "20", "100"]
    assert len(letters) == 3


@pytest.mark.parametrize(
    "odd",
    [
        *(b"secret", b"", b"\xff\0{", b"q\0[]", b"q\0{}", b"q\0" + b"[" * 100_000),
        b'q\0{"reason": "r", "died_s": "long ago", "id": null, "task": null}',
        b'q\0{"reason": "r", "died_s": NaN, "id": null, "task": null}',
        b'q\0{"reason": "r", "died_s": 1e300, "id": null, "task": null}',
    ],
)
def test_what_is_no_dead_letter_is_named_and_hides_no_other(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any, odd: bytes
) -> None:
    token = hold(lease_store, 2, b"message")
    lease_store.dead_letter(token, describe("why", None, None))
    bare.hset(f"{PREFIX}batchery:dead", mapping={"1": odd, "a\xff": odd})
    first, real, last = letters
    assert (real.token, real.reason) == ("2", "why")
    assert (first.token, last.token) == ("1", "a\xff") == tuple(letters.tokens()[::2])
    assert first.reason.startswith("this is no dead letter: ")
    assert letters.find("nobody") is None
    assert letters.requeue(letters.tokens()) == ["2"]
    assert len(letters.purge(letters.tokens())) == 2


def test_requeued_dead_letters_go_to_the_end_of_their_own_queue(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any
) -> None:
    bare.lpush("shop:embed", "waits")
    bury(lease_store, 1, b"first")
    bury(lease_store, 2, b"second")
    bury(lease_store, 3, b"urgent", "shop:embed\x06\x163")
    assert letters.requeue(["1", "2", "3", "4"]) == ["1", "2", "3"]
    # Workers take from the right.
    assert bare.lrange("shop:embed", 0, -1) == [b"second", b"first", b"waits"]
    assert bare.lrange("shop:embed\x06\x163", 0, -1) == [b"urgent"]
    assert len(letters) == 0
    assert letters.get("1") is None
    assert letters.requeue(["1"]) == []


def test_purged_dead_letters_are_deleted_with_their_messages(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any
) -> None:
    bury(lease_store, 1)
    bury(lease_store, 2)
    assert len(letters.purge(["1", "3"])) == 1
    assert letters.tokens() == ["2"]
    assert bare.hkeys("shop:batchery:dead-messages") == [b"2"]


def test_many_dead_letters_are_moved_in_parts(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any
) -> None:
    many = 2 * MAX_TOKENS_PER_COMMAND + 1
    for name, content in (("dead-messages", "{}"), ("dead", json.dumps(describe("?", "", "")))):
        values = dict.fromkeys(range(many), f"shop:embed\x00{content}")
        bare.hset(f"shop:batchery:{name}", mapping=values)
    assert len(list(letters)) == many
    assert len(letters.requeue(letters.tokens())) == many
    assert bare.llen("shop:embed") == many


def test_poison_message_becomes_a_dead_letter_when_it_is_acknowledged(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any
) -> None:
    condemned, good = hold(lease_store, 1, b"bad"), hold(lease_store, 2, b"good")
    lease = lease_store.leases.get(condemned)
    assert lease is not None
    lease.dead_letter = describe("it killed", "id", "embed")
    lease_store.flush()
    assert len(letters) == 0
    lease_store.ack(condemned)
    lease_store.ack(good)
    lease_store.flush()
    assert [letter.reason for letter in letters] == ["it killed"]
    assert not bare.exists(lease_store.lease_key)


def test_cleared_suspect_is_sent_with_the_next_batch(lease_store: LeaseStore, bare: Any) -> None:
    bare.hset("shop:batchery:suspects", mapping={"innocent": 0, "another": 0})
    token = hold(lease_store, 1, b"{}")
    lease = lease_store.leases.get(token)
    assert lease is not None
    lease.suspect, lease.deaths = "innocent", Deaths(0)
    lease_store.committed(token)
    # This batch may kill the worker, and nothing else is told before.
    lease_store.began({"2": "killer"}, alone=True)
    wait_for(lambda: bare.hkeys("shop:batchery:suspects") == [b"another"], "it is told")
