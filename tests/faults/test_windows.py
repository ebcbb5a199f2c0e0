"""The moments in which kombu's Redis transport loses or doubles a message, and ours does not.

Each test takes one message to such a moment, twice: with kombu's transport, to show that the moment
is real, and with ours. What another client sees in Redis then is what a `kill -9` leaves behind.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from batchery.transport.inbox import Inbox
from batchery.transport.lease_store import discard_lease_store
from batchery.transport.redis_schema import Keys
from support.harness import wait_for
from support.patience import patient
from support.plain_kombu import OURS, Consumer, StartConsumer, send

STOCK = "kombu.transport.redis:Transport"
KEYS = Keys()

#: After which silence a worker counts as dead here, in seconds.
EXPIRY_S = patient(0.5)


@pytest.fixture(params=[STOCK, OURS], ids=["stock", "ours"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def consume(url: str, transport: str) -> Iterator[StartConsumer]:
    with contextlib.ExitStack() as stack:

        def start(*queues: str, **options: Any) -> Consumer:
            made = Consumer(url, *queues, transport=transport, lease_expiry_s=EXPIRY_S, **options)
            stack.callback(made.close)
            return made

        yield start


def die(consumer: Consumer) -> None:
    """Leaves Redis as a killed process does: silent, and nothing tidied up."""
    lease_store = getattr(consumer.channel, "lease_store", None)
    if lease_store is not None:
        lease_store.heartbeat.stop()
        lease_store._open = False
        lease_store.holder = None
        discard_lease_store(lease_store)
    consumer.channel.is_broken = True
    consumer.channel.do_restore = False
    # Before kombu, which tidies up, can read what has come.
    consumer.channel.client.connection.disconnect()
    consumer.connection.collect()


def nowhere(bare: Any) -> bool:
    """Whether Redis has the message in no place at all."""
    return not (bare.llen("q") or bare.hlen("unacked") or held(bare) or bare.hlen(KEYS.dead))


def held(bare: Any) -> int:
    return sum(bare.hlen(key) for key in bare.keys("batchery:lease:*"))


class Killed(BaseException):
    """Where the process would be no more."""


def be_killed(*_: Any, **__: Any) -> None:
    raise Killed


def test_loss_window_1_worker_killed_between_pop_and_note(
    consume: StartConsumer,
    transport: str,
    url: str,
    bare: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = consume("q")
    send(url, "q", "job")
    with monkeypatch.context() as patch:
        patch.setattr("kombu.transport.redis.QoS.append", be_killed)
        patch.setattr(Inbox, "take_in", be_killed)
        with pytest.raises(Killed):
            consumer.get(1)
        die(consumer)
    assert nowhere(bare) == (transport == STOCK)
    if transport == OURS:
        assert consume("q").get(1) == ["job"]


def test_loss_window_2_message_popped_by_a_dead_connection(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    consumer = consume("q")
    # Stock's BRPOP must not end before the job comes.
    consumer.channel.brpop_timeout = 60
    consumer.turn()
    consumer.channel.connection.cycle.on_poll_start()
    if transport == STOCK:
        send(url, "q", "job")
    else:
        consumer.until_waiting()
        send(url, "q", "job")
        consumer.channel.ask_again()
        consumer.channel.connection.cycle.on_poll_start()
    wait_for(lambda: bare.llen("q") == 0, "Redis has answered, and nobody reads it")
    die(consumer)
    assert nowhere(bare) == (transport == STOCK)
    if transport == OURS:
        assert consume("q").get(1) == ["job"]


def test_loss_window_3_redis_is_full(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    consumer = consume("q")
    consumer.turn()
    send(url, "q", "job")
    bare.config_set("maxmemory", 1)
    if transport == STOCK:
        with pytest.raises(RedisError, match="maxmemory"):
            consumer.get(1)
        assert nowhere(bare)
    else:
        assert consumer.get(1) == ["job"]
        assert held(bare) == 1
        consumer.messages[0].ack()
        consumer.until(lambda: held(bare) == 0)


def test_loss_window_5_message_requeued_without_a_binding(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    consumer = consume("q")
    exchange = kombu.Exchange("q", type="direct")
    with kombu.Connection(url) as connection, connection.Producer() as producer:
        producer.publish("job", exchange=exchange, routing_key="q", serializer="json")
    consumer.get(1)
    bare.delete("_kombu.binding.q")
    consumer.messages[0].requeue()
    assert nowhere(bare) == (transport == STOCK)
    assert bare.llen("q") == (0 if transport == STOCK else 1)


def test_duplicate_window_1_job_runs_longer_than_the_visibility_timeout(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    options = {
        "visibility_timeout": EXPIRY_S,
        "unacked_restore_interval": 0.1,
        "unacked_restore_throttle": 1,
    }
    send(url, "q", "job")
    first = consume("q", **options)
    first.get(1)
    second = consume("q", **options)
    if transport == STOCK:
        assert second.get(1) == ["job"]
    else:
        # The first one is busy with its job: it asks nothing of its connection.
        beats = bare.zrange(KEYS.workers, 0, -1, withscores=True)
        later = [beat + 2500 * EXPIRY_S for _, beat in beats]

        def is_later() -> bool:
            now = bare.zrange(KEYS.workers, 0, -1, withscores=True)
            return bool(min(beat for _, beat in now) > max(later))

        second.until(is_later)
        assert second.texts == []
        assert held(bare) == 1


def test_duplicate_window_3_fenced_worker_acknowledges(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    send(url, "q", "job")
    first = consume("q")
    first.get(1)
    if transport == STOCK:
        first.channel.qos.restore_by_tag(first.messages[0].delivery_tag)
        second = consume("q")
        assert second.get(1) == ["job"]
        first.messages[0].ack()
        # Now the second one runs it, and if that one dies, nobody does.
        assert nowhere(bare)
    else:
        lease_store = first.channel.lease_store
        assert lease_store is not None
        lease_store.heartbeat.stop()
        second = consume("q")
        assert second.get(1) == ["job"]
        first.messages[0].ack()
        lease_store.flush()
        assert held(bare) == 1
        with contextlib.suppress(RedisConnectionError):
            first.until(lambda: False)


def test_duplicate_window_4_message_published_twice_keeps_its_id(
    consume: StartConsumer, transport: str, url: str, bare: Any
) -> None:
    """The producer's side is kombu's own: the message is there twice. Here that can be seen."""
    send(url, "q", "job", headers={"id": "the same"})
    twice = json.loads(bare.lindex("q", 0))
    bare.lpush("q", json.dumps(twice))
    consumer = consume("q")
    consumer.get(2)
    assert {message.headers["id"] for message in consumer.messages} == {"the same"}
    if transport == OURS:
        tags = {message.properties["publish_tag"] for message in consumer.messages}
        assert len(tags) == 1
