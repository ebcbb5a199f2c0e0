"""What a lease store remembers, and what it sends to Redis; the test answers for Redis."""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import pytest
import redis

from batchery.errors import RedisUnavailable
from batchery.transport import lease_store as module
from batchery.transport.lease_store import (
    MAX_SORT_STEPS,
    MAX_TOKENS_PER_COMMAND,
    LeaseStore,
    acquire_lease_store,
    discard_lease_store,
)
from batchery.transport.leases import Deaths, HeldJob
from batchery.transport.redis_schema import SCHEMA, Keys

KEYS = Keys("shop-")


class Client:
    """Redis: keeps the commands, in pipelines and by themselves."""

    def __init__(self, **options: Any) -> None:
        self.connection_pool = SimpleNamespace(connection_kwargs=options)
        self.sent: list[tuple[Any, ...]] = []
        #: Answers to the next pipelines and commands.
        self.answers: list[Any] = []
        self._queued = 0

    def pipeline(self, transaction: bool = True) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queued = 0

    def execute(self, raise_on_error: bool = True) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        answer = self.answers.pop(0) if self.answers else [1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    # Commands that a pipeline queues

    def hdel(self, *args: Any) -> Self:
        self.sent.append(("hdel", *args))
        return self

    def hexists(self, *args: Any) -> Self:
        self.sent.append(("hexists", *args))
        return self

    # Commands by themselves

    def hkeys(self, key: str) -> Any:
        # Queued if the last token is asked for as well.
        return self if key != KEYS.waiting else self._answer()

    def get(self, key: str) -> Self:
        return self

    def incrby(self, *args: Any) -> None:
        self.sent.append(("incrby", *args))

    def hmget(self, key: str, fields: Sequence[str]) -> Any:
        return self._answer()

    def info(self, section: str) -> Any:
        return {"redis_version": "7.0.0"}


class Scripts:
    """Scripts that Redis runs."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []

    def run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        self.ran.append((name, *args))
        return self.answers.pop(0) if self.answers else None

    run_once = run

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.ran]


class Exits:
    """Python's own calls at the end of a process."""

    def register(self, _: object) -> None:
        """No store of a test is left open for it."""

    unregister = register


class Owner:
    """The prefetch of a channel."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.adopted: list[str] = []

    def forget(self, token: str) -> None:
        self.forgotten.append(token)

    def adopt(self, token: str) -> None:
        self.adopted.append(token)


class Scene:
    """An open store, and who counts its leases."""

    client: Any

    def __init__(self, scripts: Scripts) -> None:
        self.client = Client()
        self.scripts = scripts
        self.store = LeaseStore(self.client, "shop-", 5.0)
        self.store.open()
        self.scripts.ran.clear()
        self.owner = Owner()

    def take(self, *tokens: str) -> None:
        for token in tokens:
            self.store.leases.take(token, self.owner, "shop-q")

    @property
    def acknowledged(self) -> list[str]:
        lease = self.store.lease_key
        return [each for name, key, *all_ in self.client.sent if key == lease for each in all_]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    made = Scripts()
    monkeypatch.setattr(module, "transport_scripts", lambda _: made)
    monkeypatch.setattr("batchery.transport.lease_store.atexit", Exits())
    return made


@pytest.fixture
def scene(scripts: Scripts) -> Scene:
    return Scene(scripts)


# Opening and closing


def test_store_knows_its_database(scripts: Scripts) -> None:
    for options, database in (({}, 0), ({"db": "3"}, 3), ({"db": None}, 0)):
        client: Any = Client(**options)
        assert LeaseStore(client, "", 1.0).db == database


def test_worker_is_registered_once_and_its_leases_go_back_once(scripts: Scripts) -> None:
    client: Any = Client()
    store = LeaseStore(client, "shop-", 5.0)
    # It was never open.
    store.close()
    assert scripts.names == []
    for _ in range(2):
        store.open()
        assert store.is_open
    assert scripts.names == ["register"]
    store.leases.take("1", Owner(), "q")
    for _ in range(2):
        store.close()
        assert not store.is_open
    assert scripts.names == ["register", "recover"]
    assert len(store.leases) == 0


def test_forked_child_leaves_the_leases_to_its_parent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.take("1")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    scene.store.requeue(["1"], first=True)
    scene.store.close()
    assert scene.scripts.names == []
    assert scene.store.is_open
    assert scene.store.holds("1")


def test_redis_that_is_too_old_for_leases_says_so(scripts: Scripts) -> None:
    client: Any = Client()
    client.info = lambda _: {"redis_version": "6.0.9"}
    with pytest.raises(RedisUnavailable, match=r"Redis 6\.0\.9"):
        LeaseStore(client, "", 5.0).open()
    assert scripts.names == []


def test_fenced_worker_holds_nothing_and_begins_anew_under_another_id(scene: Scene) -> None:
    scene.take("1", "2")
    before = scene.store.worker
    scene.store.ack("2")
    scene.store.fenced = True
    assert not scene.store.holds("1")
    assert scene.store.rejoin() == 1
    assert not scene.store.fenced
    assert scene.store.worker != before
    assert scene.owner.forgotten == ["2", "1"]
    assert scene.scripts.names == ["recover", "register"]
    # No token that was here is given out again.
    assert scene.scripts.ran[-1][-2:] == (2, SCHEMA)


# Leases


def test_unknown_lease_knows_nothing(scene: Scene) -> None:
    store = scene.store
    assert (store.get_key("9"), store.deaths("9"), store.holds("9")) == (None, None, False)
    store.suspect("9", "field", Deaths(1))
    store.published("9", "tag")
    store.dead_letter_on_ack("9", {})
    store.ack("9")
    store.flush()
    assert scene.client.sent == []
    assert scene.scripts.names == []


def test_suspect_is_cleared_when_it_is_settled_here_and_not_when_it_is_lost(scene: Scene) -> None:
    scene.take("1", "2", "3")
    for token in "123":
        scene.store.suspect(token, f"id-{token}", Deaths(1))
    assert scene.store.deaths("1") == Deaths(1)
    scene.store.ack("1")
    scene.store.committed(["2"])
    scene.store.lost(["3"])
    scene.store.flush()
    (cleared,) = [args for name, key, *args in scene.client.sent if key == KEYS.suspects]
    assert cleared == ["id-1", "delivery:id-1", "id-2", "delivery:id-2"]


# Acknowledgements


def test_acknowledgements_are_sent_together_and_once(scene: Scene) -> None:
    scene.take("1", "2")
    scene.store.ack("1")
    scene.store.ack("2")
    scene.store.ack("2")
    scene.store.flush()
    scene.store.flush()
    assert scene.client.sent == [("hdel", scene.store.lease_key, "1", "2")]
    assert scene.owner.forgotten == ["1", "2"]


def test_acknowledgements_wait_while_redis_is_away_or_refuses(scene: Scene) -> None:
    scene.take("1")
    scene.store.ack("1")
    for answer in (redis.ConnectionError("away"), [redis.ReadOnlyError("READONLY")]):
        scene.client.answers = [answer]
        with pytest.raises(redis.RedisError):
            scene.store.flush()
    scene.client.sent.clear()
    scene.store.flush()
    assert scene.acknowledged == ["1"]


def test_refused_bookkeeping_does_not_hold_up_acknowledgements(scene: Scene) -> None:
    scene.take("1", "2")
    scene.store.suspect("1", "id-1", None)
    scene.store.ack("1")
    scene.client.answers = [[1, redis.OutOfMemoryError("OOM")]]
    scene.store.flush()
    scene.store.committed(["2"])
    scene.store.flush()
    assert scene.acknowledged == ["1"]


def test_many_acknowledgements_are_sent_in_several_commands(scene: Scene) -> None:
    tokens = [str(number) for number in range(MAX_TOKENS_PER_COMMAND + 1)]
    scene.take(*tokens)
    for token in tokens:
        scene.store.ack(token)
    scene.store.flush()
    assert scene.acknowledged == tokens
    assert len(scene.client.sent) == 2


def test_job_that_has_published_is_acknowledged_with_its_dedupe_keys(scene: Scene) -> None:
    scene.take("1")
    scene.store.published("1", "tag")
    scene.store.ack("1")
    scene.store.flush()
    assert scene.scripts.ran == [("ack_published", "1")]
    assert scene.acknowledged == []


def test_poison_job_becomes_a_dead_letter_when_it_is_acknowledged(scene: Scene) -> None:
    scene.take("1")
    scene.store.published("1", "tag")
    scene.store.dead_letter_on_ack("1", {"reason": "x"})
    assert scene.scripts.ran == []
    scene.store.ack("1")
    scene.store.flush()
    assert scene.scripts.ran == [("dead_letter", "1", '{"reason": "x"}')]


@pytest.mark.parametrize("was_held", [True, False])
def test_message_that_cannot_be_read_becomes_a_dead_letter_at_once(
    scene: Scene, was_held: bool
) -> None:
    scene.take("1")
    scene.scripts.answers = [int(was_held)]
    assert scene.store.dead_letter("1", {"reason": "x"}) is was_held
    assert not scene.store.holds("1")


# Giving back


@pytest.mark.parametrize(("first", "side"), [(True, "RPUSH"), (False, "LPUSH")])
def test_messages_go_back_to_either_end_newest_first(scene: Scene, first: bool, side: str) -> None:
    scene.take("9", "10", "11")
    scene.store.requeue(["9", "11", "10"], first=first)
    assert scene.scripts.ran == [("requeue", side, "11", "10", "9")]
    assert scene.owner.forgotten == ["9", "11", "10"]
    scene.store.requeue([], first=first)
    assert len(scene.scripts.ran) == 1


def test_only_others_that_wait_are_others(scene: Scene) -> None:
    own = scene.store.worker.encode()
    for waiting, others in (([], False), ([own], False), ([own, b"w2"], True)):
        scene.client.answers = [waiting]
        assert scene.store.others_wait() is others


def test_jobs_that_went_to_others_are_forgotten_and_the_rest_is_kept(scene: Scene) -> None:
    scene.take("1", "2")
    scene.scripts.answers = [[b"1"]]
    jobs = [(HeldJob("1", True), "shop-q"), (HeldJob("2", False), "shop-p")]
    assert scene.store.give_to_waiting(jobs) == {"1"}
    # 1 stands for a batch job, 2 for an ordinary one.
    worker = scene.store.worker
    assert scene.scripts.ran == [("give_to_waiting", worker, "1", "shop-q", 1, "2", "shop-p", 2)]
    assert list(scene.store.leases) == ["2"]


def test_list_is_sorted_until_it_is_and_not_for_ever(scene: Scene) -> None:
    scene.scripts.answers = [1, 1, 0, 1]
    scene.store.sort_tenants(b"shop-q")
    assert len(scene.scripts.ran) == 3
    scene.scripts.ran.clear()
    scene.scripts.answers = [1] * 9999
    scene.store.sort_tenants(b"shop-q")
    assert len(scene.scripts.ran) == MAX_SORT_STEPS


# After a broken connection


def test_new_channel_gets_what_waits_and_counts_what_runs(scene: Scene) -> None:
    scene.take("1", "2", "3", "4")
    scene.store.leases.abandon(scene.owner)
    after = Owner()
    # Redis has lost 4; 5 was in an answer that got lost; 3 was acknowledged meanwhile.
    scene.client.answers = [
        ({b"1", b"2", b"3", b"5"}, b"5"),
        [b"shop-q\0two", None, b"shop-q\0five"],
    ]
    taken = scene.store.reconcile(after, active={"1"})
    assert taken == [("2", "shop-q", b"two"), ("5", "shop-q", b"five")]
    assert after.adopted == ["1"]
    assert not scene.store.holds("4")
    assert scene.client.sent == []


def test_reconciling_asks_for_no_messages_if_all_run(scene: Scene) -> None:
    scene.client.answers = [(set(), None), redis.ConnectionError("nothing should be asked")]
    assert scene.store.reconcile(scene.owner, active=()) == []


@pytest.mark.parametrize(("last", "behind"), [(b"7", 2), (None, 9), (b"9", 0), (b"10", 0)])
def test_redis_that_forgot_the_last_tokens_does_not_give_them_twice(
    scene: Scene, last: bytes | None, behind: int
) -> None:
    scene.take("9")
    scene.client.answers = [({b"9"}, last), [b"shop-q\0x"]]
    scene.store.reconcile(scene.owner, active=())
    expected = [("incrby", KEYS.token, behind)] if behind else []
    assert scene.client.sent == expected


def test_leases_that_redis_still_has_are_asked_for_in_one_round_trip(scene: Scene) -> None:
    scene.client.answers = [[True, False, True]]
    assert scene.store.still_held(["1", "2", "3"]) == {"1", "3"}


# Which channel has which store


def test_store_that_a_channel_has_left_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_stores", {})

    def make() -> Any:
        return SimpleNamespace(holder=None)

    first = acquire_lease_store(("h", 1), "one", make)
    assert acquire_lease_store(("h", 1), "two", make) is not first
    assert acquire_lease_store(("h", 2), "three", make) is not first
    first.holder = None
    assert acquire_lease_store(("h", 1), "four", make) is first
    assert first.holder == "four"
    # A forked child has its own.
    first.holder = None
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert acquire_lease_store(("h", 1), "five", make) is not first
    discard_lease_store(first)
    discard_lease_store(first)
    assert acquire_lease_store(("h", 1), "six", make) is not first
