"""Which messages of a job's completion a channel publishes through its outbox."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from batchery import BrokerRefused, InvalidItem
from batchery.access import KeySpace, list_patterns
from batchery.completion import JobCompletion, Outbox, completing
from batchery.transport.outbox import DEDUPE_TTL_S, OutboxChannel
from batchery.transport.redis_schema import Keys

MESSAGE = {"body": "x", "headers": {"id": "a", "task": "next"}, "properties": {"priority": 3}}


class KombuChannel:
    """Kombu's part of the channel."""

    global_keyprefix = "shop-"
    _expires: Mapping[str, int] | None = None
    unacked_key, unacked_index_key, unacked_mutex_key = "unacked", "unacked_index", "unacked_mutex"

    def __init__(self) -> None:
        self.stock: list[str] = []
        self.refusal: redis.RedisError | None = None
        self.ran: list[tuple[Any, ...]] = []

    def _put(self, queue: str, message: Mapping[str, Any], **_: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.stock.append(queue)

    def queue_declare(self, queue: str, passive: bool, **_: Any) -> None:
        KombuChannel._put(self, queue, {})

    def _get_message_priority(self, message: Any, reverse: bool) -> int:
        assert not reverse
        return int(message["properties"]["priority"])

    def _q_for_pri(self, queue: str, pri: int) -> str:
        return f"{queue}:{pri}"


class Channel(OutboxChannel, KombuChannel):
    """A channel whose scripts do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox_scripts: Any = SimpleNamespace(run=lambda *args: self.ran.append(args))


@pytest.fixture
def channel() -> Channel:
    return Channel()


def test_message_of_a_completion_is_published_with_its_dedupe_key(channel: Channel) -> None:
    outbox = Outbox("tag", {"id": "a"})
    with completing(JobCompletion(outbox=outbox)):
        channel._put("q", MESSAGE)
    ((name, keys, key, ttl_s, text),) = channel.ran
    assert (name, keys) == ("publish_once", [Keys("shop-").dedupe_keys("tag"), "shop-q:3"])
    assert (key, ttl_s) == (outbox.dedupe_key(MESSAGE), DEDUPE_TTL_S)
    assert '"id": "a"' in text
    assert outbox.has_dedupe_keys
    assert channel.stock == []


def test_nothing_is_published_without_the_job_s_lease_if_it_has_one(channel: Channel) -> None:
    holder: Any = SimpleNamespace(lease_key="lease")
    with completing(JobCompletion(outbox=Outbox("tag", {}, (holder, "7")))):
        channel._put("q", MESSAGE)
    ((_, keys, *args),) = channel.ran
    assert (keys[2:], args[3:]) == (["lease"], ["7"])


def test_message_is_held_back_while_the_outbox_holds(channel: Channel) -> None:
    outbox = Outbox("tag", {})
    outbox.holds = True
    with completing(JobCompletion(outbox=outbox)):
        channel._put("q", MESSAGE)
    assert channel.ran == []
    ((held),) = outbox.messages
    assert (held.queue_key, held.message) == ("shop-q:3", MESSAGE)


def test_all_other_messages_are_kombu_s(channel: Channel) -> None:
    channel._put("outside", MESSAGE)
    with completing(JobCompletion()):
        channel._put("no outbox", MESSAGE)
    with completing(JobCompletion(outbox=Outbox("tag", {}))):
        channel._put("many", MESSAGE, _publish_batch=object())
        channel._expires = {"expiring": 5}
        channel._put("expiring", MESSAGE)
        channel._put("q", MESSAGE)
    assert channel.stock == ["outside", "no outbox", "many", "expiring"]
    assert len(channel.ran) == 1


#: Names of keys, by patterns of access lists, but for those of queues.
OWN_KEYS = [
    pattern.replace("*", "x")
    for name, patterns in list_patterns(KeySpace(queues=["q"])).items()
    if name
    not in ("queues", "expiring", "unacked", "replies", "inboxes", "control", "events", "gossip")
    for pattern in patterns
]


@pytest.mark.parametrize("name", ["unacked", *OWN_KEYS])
def test_a_key_that_is_no_queue_s_takes_no_message(channel: Channel, name: str) -> None:
    with pytest.raises(InvalidItem, match="is no queue's; name another queue"):
        channel._put(name, MESSAGE)
    with pytest.raises(InvalidItem, match="is no queue's; name another queue"):
        channel.queue_declare(name, durable=True)
    assert channel.stock == []


@pytest.mark.parametrize("name", ["batchery", "batchery.gateway", "batchery-jobs", "unacked-jobs"])
def test_a_queue_may_have_a_name_like_those_of_keys(channel: Channel, name: str) -> None:
    channel.queue_declare(name)
    channel._put(name, MESSAGE)
    assert channel.stock == [name, name]


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (redis.ResponseError("WRONGTYPE Operation against a key"), BrokerRefused),
        (redis.exceptions.NoPermissionError("this user has no permissions"), BrokerRefused),
        (redis.OutOfMemoryError("maxmemory"), redis.OutOfMemoryError),
        (redis.ConnectionError("refused"), redis.ConnectionError),
    ],
)
def test_a_lasting_refusal_is_not_taken_for_a_lost_connection(
    channel: Channel, refusal: redis.RedisError, raised: type[Exception]
) -> None:
    channel.refusal = refusal
    for send in (partial(channel._put, "q", MESSAGE), partial(channel.queue_declare, "q")):
        with pytest.raises(raised) as caught:
            send()
        assert type(caught.value) is raised
