"""How a leasing channel connects, begins to consume, and ends."""

import contextlib
from types import SimpleNamespace
from typing import Any, Self

import kombu
import pytest
import redis

from batchery.transport import channel as module
from batchery.transport.channel import SOCKET_TIMEOUT_S, LeasingChannel, SentinelChannel
from batchery.transport.redis_schema import REPLIES_CLIENT
from support.fake_channel import Channel, KombuChannel

#: Kombu's name of the transport.
SENTINEL = "batchery.transport:SentinelTransport"

# Consuming


def test_channel_leases_from_its_first_consumer_with_acknowledgements_on() -> None:
    channel = Channel()
    channel.basic_consume("replies", no_ack=True, callback=print, consumer_tag="1")
    assert channel.lease_store is None
    assert channel.client.name == REPLIES_CLIENT
    channel.basic_consume("q", no_ack=False, callback=print, consumer_tag="2")
    store = channel.lease_store
    assert store is not None
    channel.wait()
    channel.basic_consume("p", no_ack=False, callback=print, consumer_tag="3")
    assert channel.lease_store is store
    # The new queue is asked at once.
    assert channel.state == "asks next"
    assert channel.consumed == ["replies", "q", "p"]


@pytest.mark.parametrize("is_fanout", [True, False])
def test_broadcasts_and_channels_without_leases_are_kombu_s(is_fanout: bool) -> None:
    channel = Channel()
    if is_fanout:
        channel.active_fanout_queues.add("q")
    else:
        channel.leases = False
    assert channel.basic_consume("q", no_ack=False, callback=print, consumer_tag="1") == "tag"
    assert channel.lease_store is None
    assert channel.connection._callbacks == {}
    assert channel.client.name == ""


def test_connection_of_a_worker_keeps_its_name_and_so_does_one_whose_pop_is_under_way() -> None:
    channel = Channel()
    channel._in_poll = channel.redis
    channel.basic_consume("q", no_ack=True, callback=print, consumer_tag="1")
    channel._in_poll = None
    channel.lease()
    channel.basic_consume("q", no_ack=True, callback=print, consumer_tag="2")
    assert channel.client.name == ""


def test_replies_are_consumed_although_redis_is_away() -> None:
    channel = Channel()
    channel.client.is_away = True
    channel.basic_consume("q", no_ack=True, callback=print, consumer_tag="1")
    assert channel.consumed == ["q"]


@pytest.mark.parametrize(
    ("no_ack", "tag", "counted", "acknowledged"),
    [
        (False, "7", True, False),
        (True, "7", True, True),
        (False, "uuid", True, False),
        (True, "uuid", False, False),
    ],
)
def test_delivered_message_is_counted_until_it_is_acknowledged(
    channel: Channel,
    no_ack: bool,
    tag: str,
    counted: bool,
    acknowledged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = SimpleNamespace(delivery_tag=tag)
    monkeypatch.setattr(channel, "Message", lambda *_, **__: message)
    seen: list[Any] = []
    channel.basic_consume("q", no_ack=no_ack, callback=seen.append, consumer_tag="1")
    channel.connection._callbacks["q"]({"properties": {"delivery_tag": tag}})
    assert seen == [message]
    assert (bool(channel.qos.counted), bool(channel.qos.acknowledged)) == (counted, acknowledged)


def test_leased_message_that_is_malformed_becomes_a_dead_letter(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("body")

    monkeypatch.setattr(channel, "Message", refuse)
    seen: list[Any] = []
    channel.basic_consume("q", no_ack=False, callback=seen.append, consumer_tag="1")
    deliver = channel.connection._callbacks["q"]
    deliver({"properties": {"delivery_tag": "7"}})
    assert (channel.inbox.dead, channel.qos.counted, seen) == (["7"], [], [])
    with pytest.raises(KeyError):
        deliver({"properties": {"delivery_tag": "uuid"}})


@pytest.mark.parametrize(
    ("is_entered", "is_broken", "expected"),
    [(True, False, ["stop_waiting"]), (False, False, []), (True, True, [])],
)
def test_worker_that_consumes_no_more_does_not_wait_for_work(
    channel: Channel, is_entered: bool, is_broken: bool, expected: list[str]
) -> None:
    channel.fetcher.is_entered, channel.is_broken = is_entered, is_broken
    assert channel.basic_cancel("tag") == "tag"
    assert channel.lease_store.calls == expected
    assert channel.fetcher.is_entered == (is_entered and is_broken)


class Opened:
    """A lease store, which may refuse to open."""

    expiry_s = 5.0

    def __init__(self, *_: Any) -> None:
        self.is_open = False
        self.heartbeat: Any = None
        self.refusal: Exception | None = None

    def open(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.is_open = True


class Heart:
    """A heartbeat, with the time that Redis may take for an answer to it."""

    def __init__(self, _: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.starts = 0

    def start(self) -> None:
        self.starts += 1


def open_store(channel: Channel, store: Opened, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has a channel open its lease store; returns which stores were discarded."""
    discarded: list[Any] = []
    monkeypatch.setattr(module, "acquire_lease_store", lambda *_: store)
    monkeypatch.setattr(module, "discard_lease_store", discarded.append)
    monkeypatch.setattr(module, "Heartbeat", Heart)
    monkeypatch.setattr(channel, "_make_separate_client", lambda timeout_s: timeout_s)
    with contextlib.suppress(redis.RedisError):
        LeasingChannel._open_lease_store(channel)
    return discarded


def test_store_is_opened_and_its_heartbeat_started_once_for_all_channels(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Opened()
    assert open_store(channel, store, monkeypatch) == []
    assert channel.lease_store is store
    heartbeat = store.heartbeat
    # A Redis that hangs must not cost a worker its leases.
    assert (heartbeat.starts, heartbeat.timeout_s) == (1, store.expiry_s / 2)
    # The next channel finds it open.
    open_store(channel, store, monkeypatch)
    assert (store.heartbeat, heartbeat.starts) == (heartbeat, 1)


def test_store_that_cannot_be_opened_is_no_other_channel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, store = Channel(), Opened()
    store.refusal = redis.ConnectionError("away")
    assert open_store(channel, store, monkeypatch) == [store]
    assert channel.lease_store is None
    assert store.heartbeat is None


def test_cancelling_without_leases_is_kombu_s() -> None:
    assert Channel().basic_cancel("tag") == "tag"


# Ending


def test_closed_channel_gives_its_leases_back(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded: list[Any] = []
    monkeypatch.setattr(module, "discard_lease_store", discarded.append)
    store = channel.wait().lease_store
    channel.close()
    assert channel.closed
    assert discarded == [store]
    assert store.holder is None
    assert store.calls == ["stop", "close"]
    assert channel.state == "asks next"
    # Once.
    channel.close()
    assert len(discarded) == 1


def test_store_that_never_sent_a_heartbeat_can_be_closed(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "discard_lease_store", lambda _: None)
    channel.lease_store.heartbeat = None
    channel.close()
    assert channel.lease_store.calls == ["close"]


def test_heartbeat_ends_although_nothing_can_be_given_back(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise redis.ConnectionError("as told")

    discarded: list[Any] = []
    monkeypatch.setattr(module, "discard_lease_store", discarded.append)
    # Kombu's close gives back what the channel counts.
    monkeypatch.setattr(KombuChannel, "close", refuse)
    with pytest.raises(redis.ConnectionError, match="as told"):
        channel.close()
    assert discarded == [channel.lease_store]
    assert channel.lease_store.holder is None
    assert channel.lease_store.calls == ["stop", "close"]


def test_broken_channel_leaves_its_leases_to_the_next_one(channel: Channel) -> None:
    channel.is_broken = True
    channel.close()
    assert channel.lease_store.holder is None
    assert channel.lease_store.calls == []


def test_answer_to_a_fetch_is_never_taken_for_one_of_kombu_s(channel: Channel) -> None:
    channel.is_broken = True
    channel.turn()
    channel.close()
    assert channel.redis._sock == 2


def test_wait_ends_without_a_new_connection(channel: Channel) -> None:
    channel.is_broken = True
    channel.wait().close()
    assert channel.redis._sock == 1


# Connecting


def test_redis_must_answer_within_a_time_even_if_none_was_set(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert channel._connparams()["socket_timeout"] == SOCKET_TIMEOUT_S
    assert "protocol" not in channel._connparams()
    assert channel._connparams(asynchronous=True)["protocol"] == 3
    monkeypatch.setattr(KombuChannel, "_connparams", lambda *_: {"socket_timeout": 3.0})
    assert channel._connparams()["socket_timeout"] == 3.0


@pytest.mark.parametrize("transport", [None, SimpleNamespace(client=None)])
def test_closed_channel_does_not_connect(channel: Channel, transport: Any) -> None:
    channel.connection = transport
    with pytest.raises(redis.ConnectionError, match="closed"):
        channel._connparams()


def test_client_for_commands_is_made_once_for_each_pool(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def create(_: Any, asynchronous: bool = False) -> Any:
        made.append((asynchronous, SimpleNamespace(connection_pool=channel.pool)))
        return made[-1][1]

    monkeypatch.setattr(KombuChannel, "_create_client", create, raising=False)
    monkeypatch.setattr(channel, "pool", "first", raising=False)
    first = channel._create_client()
    assert channel._create_client() is first
    monkeypatch.setattr(channel, "pool", "second")
    assert channel._create_client() is not first
    assert channel._create_client(asynchronous=True) is not channel._create_client(
        asynchronous=True
    )
    assert [asynchronous for asynchronous, _ in made] == [False, False, True, True]


@pytest.mark.parametrize(("given", "expected"), [(None, 2.5), (1.0, 1.0), (9.0, 2.5)])
def test_separate_client_waits_no_longer_than_it_may(
    channel: Channel, given: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = redis.ConnectionPool(socket_timeout=given)
    monkeypatch.setattr(channel, "_get_pool", lambda: pool, raising=False)
    client = channel._make_separate_client(2.5)
    assert client.connection_pool.connection_kwargs["socket_timeout"] == expected


def test_stores_of_two_masters_databases_or_prefixes_are_not_the_same(channel: Channel) -> None:
    first = channel._database_identity()
    assert first == channel._database_identity()
    channel.global_keyprefix = "other-"
    second = channel._database_identity()
    channel.master_name = "m2"
    assert len({first, second, channel._database_identity()}) == 3


def test_store_behind_several_sentinels_is_the_same_at_each_of_them() -> None:
    with kombu.Connection("sentinel://a:1;sentinel://b:2", transport=SENTINEL) as connection:
        channel: Any = SentinelChannel.__new__(SentinelChannel)
        channel.connection = connection.transport
        first = channel._database_identity()
        connection.switch(connection.alt[1])
        channel.connection = connection.transport
        assert channel._database_identity() == first
    with kombu.Connection("sentinel://c:3", transport=SENTINEL) as connection:
        channel.connection = connection.transport
        assert channel._database_identity()[:2] == ("c", "3")


# A full Redis


class Pipe:
    """A pipeline that is not a transaction."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.deleted: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Is left."""

    def pipeline(self, transaction: bool) -> "Pipe":
        assert not transaction
        return self

    def llen(self, key: str) -> None:
        self.asked.append(key)

    def execute(self) -> list[Any]:
        return [5, "not a length"]

    def delete(self, key: str) -> None:
        self.deleted.append(key)


@pytest.mark.parametrize(
    "refusal",
    [redis.OutOfMemoryError("OOM"), redis.ResponseError("Error running script: 2: -OOM")],
)
def test_full_redis_lets_a_worker_start_and_count_and_delete(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse_as_full(*_: Any, **__: Any) -> None:
        raise refusal

    pipe = Pipe()
    monkeypatch.setattr(
        channel, "conn_or_acquire", lambda: contextlib.nullcontext(pipe), raising=False
    )
    for name in ("_queue_bind", "_refresh_bindings", "_delete"):
        monkeypatch.setattr(KombuChannel, name, refuse_as_full, raising=False)
    channel._queue_bind("exchange", "key", "pattern", "q")
    channel._refresh_bindings(["q"])
    channel._delete("q")
    assert pipe.deleted == ["q", "q\x063"]
    assert channel._size("q") == 5
    assert pipe.asked == ["q", "q\x063"]


def test_a_queue_of_broadcasts_is_written_down_nowhere(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    for name in ("_queue_bind", "_refresh_bindings"):
        monkeypatch.setattr(KombuChannel, name, lambda _, *args: bound.append(args), raising=False)
    channel._queue_bind("fanout", "news.#", "", "mine")
    assert bound == []
    assert channel._fanout_queues == {"mine": ("fanout", "news.*")}
    channel._queue_bind("direct", "key", "", "q")
    channel._refresh_bindings(["mine", "q"])
    assert bound == [("direct", "key", "", "q"), (["q"],)]


def test_other_refusals_of_a_binding_or_a_deletion_are_raised(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise redis.ResponseError("WRONGTYPE no set")

    for name in ("_queue_bind", "_delete"):
        monkeypatch.setattr(KombuChannel, name, refuse, raising=False)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        channel._queue_bind("exchange", "key", "pattern", "q")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        channel._delete("q")


def test_queue_that_was_deleted_needs_no_second_command(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(
        KombuChannel, "_delete", lambda _, name: deleted.append(name), raising=False
    )
    channel._delete("q")
    assert deleted == ["q"]
