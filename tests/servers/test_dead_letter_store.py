"""Dead letters in Redis, and what can be read of a message that is broken."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from batchery.transport.dead_letters import (
    MAX_REASON_CHARS,
    MAX_TOKENS_PER_COMMAND,
    DeadLetters,
    dead_letter_unread,
    describe,
    on_dead_letter,
)
from batchery.transport.lease_store import LeaseStore
from batchery.transport.leases import Deaths
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


@pytest.fixture
def told() -> Iterator[list[tuple[Any, str]]]:
    """What a worker is told of dead letters."""
    before, made = list(on_dead_letter), list[tuple[Any, str]]()

    def tell(headers: Any, reason: str, store: LeaseStore, token: str) -> None:
        # Until its caller is told, nobody loses the message.
        assert store.holds(token)
        made.append((headers, reason))
        store.ack(token)
        store.flush()

    on_dead_letter[:] = [tell]
    yield made
    on_dead_letter[:] = before


class Counter:
    """A channel's QoS, which counts nothing here."""

    def adopt(self, token: str) -> None: ...

    def forget(self, token: str) -> None: ...


COUNTER = Counter()


def hold(lease_store: LeaseStore, token: int, message: bytes, key: str = "shop:embed") -> str:
    """Lets a lease_store have a lease."""
    lease_store.client.hset(lease_store.lease_key, token, key.encode() + b"\0" + message)
    lease_store.leases.take(str(token), COUNTER, key)
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
    assert letters.purge(letters.tokens()) == 2


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
    assert letters.purge(["1", "3"]) == 1
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
    lease_store.dead_letter_on_ack(condemned, describe("it killed", "id", "embed"))
    lease_store.flush()
    assert len(letters) == 0
    lease_store.ack(condemned)
    lease_store.ack(good)
    lease_store.flush()
    assert [letter.reason for letter in letters] == ["it killed"]
    assert not bare.exists(lease_store.lease_key)


def test_poison_message_that_is_requeued_becomes_no_dead_letter(
    lease_store: LeaseStore, letters: DeadLetters, bare: Any
) -> None:
    condemned = hold(lease_store, 1, b"bad")
    lease_store.dead_letter_on_ack(condemned, describe("it killed", "id", "embed"))
    lease_store.requeue([condemned], first=True)
    lease_store.flush()
    assert bare.lrange("shop:embed", 0, -1) == [b"bad"]
    assert len(letters) == 0


def test_a_full_redis_does_not_hold_up_acknowledgements(lease_store: LeaseStore, bare: Any) -> None:
    token = hold(lease_store, 1, b"{}")
    bare.config_set("maxmemory", 1)
    lease_store.began({token: "id"}, alone=True)
    lease_store.flush()
    lease_store.ack(token)
    lease_store.flush()
    assert not bare.exists(lease_store.lease_key)


def test_notes_of_running_batches_are_written_and_removed(
    lease_store: LeaseStore, bare: Any
) -> None:
    key = f"shop:batchery:running:{lease_store.worker}"

    def told(*notes: bytes) -> None:
        wait_for(lambda: bare.hvals(key) == list(notes), "the notes arrive")

    first = lease_store.began({"1": "a-1", "2": "odd id"}, alone=False)
    told(b"shared 1 a-1 2 odd%20id")
    wait_for(lambda: bare.ttl(key) > 0, "they will expire")
    lease_store.ended(first)
    # It is not worth a message of its own.
    lease_store.flush()
    assert bare.exists(key)
    lease_store.began({"3": "b"}, alone=True)
    told(b"alone 3 b")


def test_a_batch_that_a_fetch_has_noted_needs_no_other_note(
    lease_store: LeaseStore, bare: Any
) -> None:
    key = f"shop:batchery:running:{lease_store.worker}"

    def fetch(token: str) -> None:
        assert not lease_store.running_batches.are_some
        bare.delete(key)
        bare.hset(key, "0", f"shared {token} ?")
        lease_store.running_batches.fetched(token)

    def told(**notes: str) -> None:
        expected = {number.lstrip("_"): note for number, note in notes.items()}
        wait_for(lambda: read_notes() == expected, "the notes arrive")

    def read_notes() -> dict[str, str]:
        return {name.decode(): note.decode() for name, note in bare.hgetall(key).items()}

    for token in ("1", "2"):
        fetch(token)
        batch = lease_store.began({token: "job"}, alone=False)
        assert lease_store.running_batches.are_some
        lease_store.ended(batch)
    fetch("3")
    batch = lease_store.began({"3": "job"}, alone=False)
    other = lease_store.began({"4": "other"}, alone=False)
    # Those before have ended, and this one has not.
    told(_0="shared 3 ?", _1="shared 4 other")
    lease_store.ended(batch)
    last = lease_store.began({"5": "third"}, alone=False)
    told(_1="shared 4 other", _2="shared 5 third")
    lease_store.ended(other)
    lease_store.ended(last)
    assert not lease_store.running_batches.are_some


@pytest.mark.parametrize("how", ["alone", "with another", "not at all", "answer lost"])
def test_a_note_of_a_fetch_that_does_not_fit_is_removed(
    lease_store: LeaseStore, bare: Any, how: str
) -> None:
    key = f"shop:batchery:running:{lease_store.worker}"
    bare.hset(key, "0", "shared 1 ?")
    if how == "answer lost":
        lease_store.running_batches.forget_fetched()
    else:
        lease_store.running_batches.fetched("1")
    jobs = {"1": "a", "2": "b"} if how == "with another" else {"1": "a"}
    if how == "not at all":
        jobs = {"2": "b"}
    lease_store.began(jobs, alone=how == "alone")
    wait_for(lambda: bare.hkeys(key) == [b"1"], "it is told")


def test_a_suspect_that_is_cleared_is_told_although_the_fetch_has_noted_the_batch(
    lease_store: LeaseStore, bare: Any
) -> None:
    bare.hset("shop:batchery:suspects", mapping={"innocent": 0, "another": 0})
    token = hold(lease_store, 1, b"{}")
    lease_store.suspect(token, "innocent", Deaths(0))
    lease_store.committed([token])
    lease_store.running_batches.fetched("2")
    lease_store.began({"2": "killer"}, alone=False)
    wait_for(lambda: bare.hkeys("shop:batchery:suspects") == [b"another"], "it is told")


def test_cleared_suspect_is_sent_with_the_next_batch(lease_store: LeaseStore, bare: Any) -> None:
    bare.hset("shop:batchery:suspects", mapping={"innocent": 0, "another": 0})
    token = hold(lease_store, 1, b"{}")
    lease_store.suspect(token, "innocent", Deaths(0))
    lease_store.committed([token])
    # This batch may kill the worker, and nothing else is told before.
    lease_store.began({"2": "killer"}, alone=True)
    wait_for(lambda: bare.hkeys("shop:batchery:suspects") == [b"another"], "it is told")


def test_notes_survive_a_lost_connection_and_a_redis_that_refuses(
    lease_store: LeaseStore, bare: Any
) -> None:
    def told(*jobs: str) -> None:
        for job in jobs:
            lease_store.began({"1": job}, alone=True)
        key = f"shop:batchery:running:{lease_store.worker}"
        wait_for(lambda: f"alone 1 {jobs[-1]}".encode() in bare.hvals(key), "the note arrives")

    told("first")
    bare.client_kill_filter(_type="normal", skipme=True)
    told("second")
    bare.config_set("maxmemory", 1)
    lease_store.began({"1": "refused"}, alone=True)
    wait_for(lease_store.running_batches._connection.can_read, "Redis has refused")
    bare.config_set("maxmemory", 0)
    told("third", "fourth")


EMBED = {"chain": [1], "chord": {"task": "sum"}, "callbacks": None, "errbacks": None}


BODY = json.dumps([[1], {}, EMBED])


@pytest.mark.parametrize("body", [BODY, base64.b64encode(BODY.encode()).decode()])
def test_caller_of_a_malformed_message_is_told_with_its_chord(
    lease_store: LeaseStore, letters: DeadLetters, told: Any, body: str
) -> None:
    headers = {"id": "an-id", "task": "embed", "group": "g"}
    message = json.dumps({"headers": headers, "body": body}).encode()
    dead_letter_unread(lease_store, hold(lease_store, 1, message), "no 'properties'")
    ((known, reason),) = told
    assert known == {**headers, **EMBED}
    (letter,) = letters
    assert letter.reason == reason == "no 'properties'"
    assert (letter.id, letter.task) == ("an-id", "embed")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"headers": []}',
        b'{"headers": {"id": 7}}',
        b'{"headers": {"task": "x"}}',
        b"[" * 100_000,
    ],
)
def test_malformed_message_without_an_id_tells_nobody(
    lease_store: LeaseStore, letters: DeadLetters, told: Any, message: bytes
) -> None:
    dead_letter_unread(lease_store, hold(lease_store, 1, message), "x" * 5000)
    assert told == []
    (letter,) = letters
    assert letter.id is None
    assert len(letter.reason) == MAX_REASON_CHARS
