"""What goes wrong between a plain kombu consumer and Redis, and what comes again after it."""

import contextlib
from typing import Any

import pytest
import redis

from batchery.transport.redis_schema import Keys
from support.harness import wait_for
from support.plain_kombu import StartConsumer, leases, send, waiting


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


def test_a_key_that_something_else_has_written_is_named(
    both: StartConsumer, bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = both("q")
    bare.lpush(Keys().waiting, "no hash")
    bare.lpush("q", "wakes it")
    with pytest.raises(redis.ConnectionError, match="WRONGTYPE"):
        consumer.until(lambda: False)
    assert "key batchery:waiting of Redis is a list, not a hash" in caplog.text
    assert "redis-cli DEL batchery:waiting" in caplog.text
    bare.delete(Keys().waiting)  # Or the worker could not leave, either.
