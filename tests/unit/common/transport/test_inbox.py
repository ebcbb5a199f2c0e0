"""What becomes of the messages of a fetch: delivered, given back, or dead letters."""

import json
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.exceptions import WorkerShutdown
from celery.worker import state as worker_state

from batchery.transport.inbox import Capacity, Inbox, encode_entry
from batchery.transport.leases import Deaths, Leases
from batchery.transport.redis_schema import Keys
from batchery.transport.suspects import MAX_DELIVERY_DEATHS


class Store:
    """The leases of a worker; the test says what Redis knows of suspects."""

    keys = Keys()
    lease_key = "lease"

    def __init__(self) -> None:
        self.leases = Leases()
        self.client = self
        #: Values in the HASH of suspects.
        self.suspects: dict[str, bytes] = {}
        self.marked: dict[str, Any] = {}
        self.requeued: list[str] = []
        self.dead: dict[str, str] = {}
        self.notes: list[str] = []
        self.blamed: list[str] = []
        #: What was leased for a channel that is gone.
        self.left: list[tuple[str, str, bytes]] = []

    def take(self, token: str, owner: Any, key: str) -> None:
        self.leases.take(token, None, key)  # type: ignore[arg-type]

    def holds(self, token: str) -> bool:
        return token in self.leases

    def hmget(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        assert key == self.keys.suspects
        return [self.suspects.get(field) for field in fields]

    def hget(self, key: str, token: str) -> bytes | None:
        return None

    def suspect(self, token: str, field: str, deaths: Deaths | None) -> None:
        self.marked[token] = deaths

    def note_delivery(self, token: str) -> None:
        self.notes.append(token)

    def forget_delivery(self) -> None:
        self.notes.append("forgotten")

    def blame_delivery(self, suspect: str) -> None:
        self.blamed.append(suspect)

    def requeue(self, tokens: Collection[str], *, first: bool) -> None:
        assert first
        self.requeued += tokens
        for token in tokens:
            self.leases.forget(token)

    def dead_letter(self, token: str, letter: Any) -> bool:
        self.dead[token] = letter["reason"]
        return self.leases.forget(token) is not None

    def reconcile(self, owner: Any, active: Collection[str]) -> list[tuple[str, str, bytes]]:
        assert active == {"77"}
        return self.left


class Scene:
    """An inbox between leases and a consumer of the queue `q`."""

    def __init__(self) -> None:
        self.store = Store()
        self.delivered: list[Any] = []
        self.on_message: Callable[[Any], None] = self.delivered.append
        self.turns: list[str] = []
        self.prepared = 0
        channel: Any = SimpleNamespace(
            qos=None,
            sep="\x06\x16",
            global_keyprefix="shop-",
            connection=SimpleNamespace(_callbacks={"q": lambda payload: self.on_message(payload)}),
            _queue_cycle=SimpleNamespace(rotate=self.turns.append),
            prepare_anew=self._prepare,
        )
        store: Any = self.store
        self.inbox = Inbox(channel, store)

    def _prepare(self) -> None:
        self.prepared += 1

    def take_in(
        self, *messages: bytes, suspects: int = 0, queues: Sequence[int] | None = None
    ) -> None:
        """Hands over what a fetch has brought, with tokens from 7 on."""
        answer: list[Any] = [suspects, 7]
        for number, message in zip(queues or [0] * len(messages), messages, strict=True):
            answer += [number, message]
        self.inbox.take_in(answer, ("shop-q", "shop-q\x06\x163", "shop-gone"))

    @property
    def tags(self) -> list[str]:
        return [payload["properties"]["delivery_tag"] for payload in self.delivered]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def message(task_id: str = "a", **more: Any) -> bytes:
    properties = {"delivery_tag": f"tag-{task_id}", "delivery_info": {}}
    return json.dumps({"headers": {"id": task_id}, "properties": properties, **more}).encode()


def test_messages_of_all_priorities_are_delivered_with_their_tokens(scene: Scene) -> None:
    scene.take_in(message("a"), message("b"), message("c"), queues=[0, 1, 0])
    assert scene.tags == ["7", "8", "9"]
    assert scene.delivered[0]["properties"]["publish_tag"] == "tag-a"
    assert scene.delivered[0]["headers"] == {"id": "a"}
    assert scene.inbox.count == 3
    # The queue of the first one has had its turn.
    assert scene.turns == ["q"]
    assert scene.store.leases.by_key() == {"shop-q": 2, "shop-q\x06\x163": 1}
    assert scene.store.requeued == []
    assert scene.store.notes == []


def test_jobs_that_wait_for_their_time_are_counted_until_it_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled, reserved = list[Any](), list[Any]()
    monkeypatch.setattr(worker_state, "scheduled_requests", scheduled)
    monkeypatch.setattr(worker_state, "reserved_requests", reserved)

    def schedule(payload: Any) -> None:
        tag = payload["properties"]["delivery_tag"]
        requests = reserved if payload["headers"]["id"] == "now" else scheduled
        requests.append(SimpleNamespace(message=SimpleNamespace(delivery_tag=tag)))

    scene.on_message = schedule
    scene.take_in(message("a"), message("now"), message("b"), message("c"), queues=[0, 0, 0, 1])
    assert scene.inbox.count_scheduled() == {"shop-q": 2, "shop-q\x06\x163": 1}
    # Celery begins one of them.
    reserved.append(scheduled.pop(0))
    assert scene.inbox.count_scheduled() == {"shop-q": 1, "shop-q\x06\x163": 1}
    # Another one is revoked.
    scheduled.pop(0)
    scene.store.leases.forget("9")
    assert scene.inbox.count_scheduled() == {"shop-q\x06\x163": 1}


def test_messages_of_a_queue_that_is_consumed_no_more_go_back(scene: Scene) -> None:
    scene.take_in(message("a"), message("b"), queues=[2, 0])
    assert scene.tags == ["8"]
    assert scene.store.requeued == ["7"]
    assert scene.inbox.count == 1


@pytest.mark.parametrize("raw", [b"{", b"[]", b"{}", b'{"properties": 1}', b"null", b"[" * 99_999])
def test_message_that_is_none_becomes_a_dead_letter_and_no_other(scene: Scene, raw: bytes) -> None:
    scene.take_in(raw, message("b"))
    assert list(scene.store.dead) == ["7"]
    assert "cannot be understood" in scene.store.dead["7"]
    assert scene.tags == ["8"]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("shop-q", ("q", 0)),
        ("shop-q\x06\x163", ("q", 3)),
        ("shop-a\x06\x16b", ("a\x06\x16b", 0)),
        ("q9", ("q9", 0)),
        ("7", ("7", 0)),
    ],
)
def test_key_of_a_queue_says_its_name_and_priority(
    scene: Scene, key: str, place: tuple[str, int]
) -> None:
    assert scene.inbox.find_place(key) == place
    assert scene.inbox.find_place(key) == place


# Suspects


def test_nobody_asks_for_suspects_where_there_are_none(scene: Scene) -> None:
    scene.store.suspects["a"] = b"1"
    scene.take_in(message("a"))
    assert scene.store.marked == {}
    assert scene.tags == ["7"]


def test_job_that_was_on_a_device_when_its_worker_died_is_a_suspect(scene: Scene) -> None:
    scene.store.suspects["b"] = b"1"
    scene.take_in(message("a"), message("b"), suspects=1)
    assert scene.store.marked == {"8": Deaths(1)}
    assert scene.tags == ["7", "8"]
    # It is read with a note of its own, which is removed.
    assert scene.store.notes == ["8", "forgotten"]


def test_job_whose_worker_died_while_it_read_it_is_noted_and_read(scene: Scene) -> None:
    scene.store.suspects["delivery:a"] = b"%d" % (MAX_DELIVERY_DEATHS - 1)
    scene.take_in(message("a"), suspects=1)
    assert scene.store.marked == {"7": None}
    assert scene.tags == ["7"]
    assert scene.store.notes == ["7", "forgotten"]


def test_job_that_ended_workers_by_being_read_is_read_no_more(scene: Scene) -> None:
    scene.store.suspects["delivery:a"] = b"%d" % MAX_DELIVERY_DEATHS
    scene.take_in(message("a"), message("b"), suspects=1)
    assert f"ended {MAX_DELIVERY_DEATHS} workers" in scene.store.dead["7"]
    assert scene.tags == ["8"]


def test_fetch_with_suspects_may_bring_nothing_that_can_be_read(scene: Scene) -> None:
    scene.take_in(b"{", suspects=1)
    assert scene.tags == []
    assert scene.store.requeued == []


# Consumers that fail


def test_lost_connection_leaves_the_rest_to_the_next_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(payload: Any) -> None:
        scene.delivered.append(payload)
        if len(scene.delivered) == 2:
            raise redis.ConnectionError("lost")

    scene.on_message = lose
    disowned: list[str] = []
    monkeypatch.setattr(scene.store.leases, "disown", disowned.extend)
    with pytest.raises(redis.ConnectionError):
        scene.take_in(message("a"), message("b"), message("c"))
    assert scene.prepared == 1
    assert disowned == ["9"]
    assert scene.store.requeued == []


def test_messages_behind_one_that_a_consumer_refuses_go_back(scene: Scene) -> None:
    def refuse(payload: Any) -> None:
        raise LookupError("a consumer's own error")

    scene.on_message = refuse
    with pytest.raises(LookupError):
        scene.take_in(message("a"), message("b"), message("c"))
    assert scene.store.requeued == ["8", "9"]
    assert scene.prepared == 0


@pytest.mark.parametrize(("error", "blamed"), [(SystemExit, ["a"]), (WorkerShutdown, [])])
def test_message_that_ends_the_worker_is_blamed_for_it_unless_celery_ends_it(
    scene: Scene, error: type[BaseException], blamed: list[str]
) -> None:
    def end(payload: Any) -> None:
        raise error

    scene.on_message = end
    with pytest.raises(error):
        scene.take_in(message("a"), message("b"))
    assert scene.store.blamed == blamed
    assert scene.store.requeued == ["8"]


# After a broken connection


def test_what_was_leased_before_is_delivered_as_redelivered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = SimpleNamespace(message=SimpleNamespace(delivery_tag="77"))
    monkeypatch.setattr(worker_state, "active_requests", {"of Celery": active}.values())
    scene.store.suspects["a"] = b"-4"
    scene.store.left = [
        ("3", "shop-q", message("a")),
        ("4", "shop-q", message("b", headers=None, properties={"delivery_info": []})),
    ]
    scene.inbox.reconcile()
    assert scene.tags == ["3", "4"]
    first, second = scene.delivered
    assert first["headers"]["redelivered"] is True
    assert first["properties"]["delivery_info"]["redelivered"] is True
    assert second["headers"] is None
    # It may have been on a device.
    assert scene.store.marked == {"3": Deaths(0, 4)}


# What Redis is told of a worker that waits


def test_entry_names_only_queues_for_which_there_is_room() -> None:
    kinds = {"a": 1, "b": 3, "c": 0, "d": 2}
    assert encode_entry(Capacity(8, 2), kinds) == '[8, 2, {"a": 1, "b": 3, "d": 2}]'
    assert encode_entry(Capacity(8, 0), kinds) == '[8, 0, {"a": 1, "b": 1}]'
    assert encode_entry(Capacity(0, 2), {"a": 1}) == ""
    assert encode_entry(Capacity(), {"a": 3}) == ""
