"""What goes wrong between a plain kombu consumer and Redis, and what comes again after it."""

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from batchery.transport.redis_schema import Keys
from support.harness import wait_for
from support.own_redis import OwnRedis
from support.plain_kombu import Consumer, StartConsumer, leases, send, waiting


def test_recover_gives_back_what_is_not_acknowledged(
    both: StartConsumer, url: str, bare: Any
) -> None:
    send(url, "q", "1", "2")
    consumer = both("q")
    consumer.get(2)
    consumer.channel.basic_recover(requeue=True)
    assert consumer.get(4) == ["1", "2", "1", "2"]


def test_a_consumer_that_raises_loses_nothing(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", *"1234")
    consumer = both("q")

    def fail(message: Any) -> None:
        consumer.messages.append(message)
        if message.payload == "2":
            raise LookupError("as told")

    consumer.consumer.on_message = fail
    with contextlib.suppress(LookupError):
        consumer.get(2)
    assert consumer.texts == ["1", "2"]
    assert waiting(bare) == 2
    assert consumer.get(4) == ["1", "2", "3", "4"]
    assert leases(bare) == 4


def test_message_whose_delivery_failed_is_redelivered_and_marked(
    both: StartConsumer, url: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(url, "q", *"123")
    consumer = both("q", prefetch=4)
    consumer.get(3)
    consumer.break_connection()
    consumer.open("q")

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise redis.ConnectionError("as told")

    monkeypatch.setattr("batchery.transport.inbox.Inbox._recognise_suspects", fail)
    with contextlib.suppress(redis.ConnectionError):
        consumer.get(3)
    assert waiting(bare) == 0
    assert consumer.get(3) == ["1", "2", "3"]
    assert all(message.delivery_info["redelivered"] for message in consumer.messages)


def test_break_redelivers_waiting_messages_and_not_running_ones(
    both: StartConsumer, url: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(url, "q", *"123")
    consumer = both("q", prefetch=4)
    consumer.get(3)
    running = consumer.messages[1]
    monkeypatch.setattr("batchery.transport.inbox.active_tokens", lambda: {running.delivery_tag})
    consumer.break_connection()
    assert leases(bare) == 3
    consumer.open("q")
    assert consumer.get(2) == ["1", "3"]
    # It still counts, and its acknowledgement still arrives.
    send(url, "q", "4", "5")
    consumer.get(3)
    for _ in range(3):
        consumer.turn()
    assert consumer.texts == ["1", "3", "4"]
    running.ack()
    assert consumer.get(4) == ["1", "3", "4", "5"]
    consumer.until(lambda: leases(bare) == 4)


def test_message_of_a_lost_answer_is_delivered(both: StartConsumer, url: str, bare: Any) -> None:
    consumer = both("q")
    send(url, "q", *"123")
    consumer.channel.connection.cycle.on_poll_start()
    wait_for(lambda: leases(bare) == 3, "Redis has answered")
    consumer.channel.client.connection.disconnect()
    assert consumer.get(3) == list("123")


def test_message_of_a_lost_answer_is_delivered_over_a_new_channel(
    both: StartConsumer, url: str, bare: Any
) -> None:
    consumer = both("q")
    send(url, "q", *"123")
    consumer.channel.connection.cycle.on_poll_start()
    wait_for(lambda: leases(bare) == 3, "Redis has answered")
    consumer.break_connection()
    consumer.open("q")
    assert consumer.get(3) == list("123")


def test_message_of_a_lost_wake_up_is_delivered(both: StartConsumer, url: str, bare: Any) -> None:
    consumer = both("q")
    consumer.until_waiting()
    send(url, "q", "1")
    consumer.channel.client.connection.read_response(push_request=True)
    assert consumer.get(1) == ["1"]


def test_scripts_may_be_flushed(both: StartConsumer, url: str, bare: Any) -> None:
    consumer = both("q")
    consumer.until_waiting()
    bare.script_flush()
    send(url, "q", "1")
    assert consumer.get(1) == ["1"]
    bare.script_flush()
    consumer.messages[0].requeue()
    assert consumer.get(2) == ["1", "1"]


@pytest.mark.parametrize("error", [redis.TimeoutError("as told"), OSError("as told")])
def test_message_that_cannot_go_back_is_delivered_again(
    both: StartConsumer,
    url: str,
    bare: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    send(url, "q", "1", "2")
    consumer = both("q")
    consumer.get(2)
    consumer.until_waiting()

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(consumer.channel.lease_store.scripts, "run", fail)
    logger = logging.getLogger(__name__)
    consumer.messages[0].reject_log_error(logger, (type(error),), requeue=True)
    assert "reject" in caplog.text
    assert consumer.get(3) == ["1", "2", "1"]
    assert leases(bare) == 2


def test_channel_whose_messages_cannot_go_back_leaves_no_heartbeat(
    url: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(url, "q", "1")
    consumer = Consumer(url, "q")
    consumer.get(1)
    store = consumer.channel.lease_store

    def fail(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError("as told")

    monkeypatch.setattr(store, "requeue", fail)
    with contextlib.suppress(redis.ConnectionError):
        consumer.channel.close()
    wait_for(lambda: not store.heartbeat._thread.is_alive(), "the heartbeat ends")
    assert (leases(bare), waiting(bare)) == (0, 1)
    # What kombu does at the end of the process for a channel that was left half closed.
    consumer.channel.qos._on_collect.cancel()
    consumer.close()


def test_as_many_threads_as_complete_jobs_may_ask_for_leases_at_once(
    own_redis: OwnRedis,
) -> None:
    send(own_redis.url, "q", "1")
    with contextlib.closing(Consumer(own_redis.url, "q")) as consumer:
        consumer.get(1)
        store, token = consumer.channel.lease_store, consumer.messages[0].delivery_tag
        with ThreadPoolExecutor(64) as threads:
            with own_redis.hanging():
                asked = [threads.submit(store.still_held, [token]) for _ in range(64)]
                pool = store.client.connection_pool
                wait_for(lambda: len(pool._in_use_connections) == 64, "all of them ask")
                consumer.messages[0].ack()
                flushed = threads.submit(store.flush)
            assert {len(each.result()) for each in asked} <= {0, 1}
            flushed.result()
        assert leases(store.client) == 0


def test_lost_connections_leave_nothing_on_the_event_loop(
    consume: StartConsumer, url: str, bare: Any
) -> None:
    """Else a worker keeps a transport for each, and calls it in each turn of its loop."""
    consumer = consume("q", hub=True)
    ticks = len(consumer.hub.on_tick)
    for number in range(1, 4):
        consumer.break_connection()
        assert not consumer.hub.on_tick
        consumer.open("q")
        assert len(consumer.hub.on_tick) == ticks
        send(url, "q", str(number))
        assert consumer.get(1) == [str(number)]
        consumer.messages.pop().ack()
        consumer.until(lambda: leases(bare) == 0)
    # The same transport may come to its loop again, as Celery's worker lets it.
    consumer.connection.register_with_event_loop(consumer.hub)
    assert len(consumer.hub.on_tick) == ticks


def test_a_key_that_something_else_has_written_is_named(
    both: StartConsumer, bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = both("q")
    bare.lpush(Keys().tenants, "no hash")
    bare.lpush("q", "wakes it")
    with pytest.raises(redis.ConnectionError, match="WRONGTYPE"):
        consumer.until(lambda: False)
    assert "key batchery:tenants of Redis is a list, not a hash" in caplog.text
    assert "redis-cli DEL batchery:tenants" in caplog.text
