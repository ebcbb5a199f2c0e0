"""The transport under plain kombu: no Celery, no task, on every redis-server that there is."""

import contextlib
import threading
import time
from typing import Any

import pytest
import redis

from batchery.transport.redis_schema import Keys
from support.harness import wait_for
from support.plain_kombu import Consumer, StartConsumer, find_queue, leases, send, waiting

KEYS = Keys()


def test_waiting_messages_are_delivered_in_order_and_acknowledged(
    both: StartConsumer, url: str, bare: Any
) -> None:
    send(url, "q", *"12345")
    consumer = both("q")
    assert consumer.get(5) == list("12345")
    assert leases(bare) == 5
    assert waiting(bare) == 0
    for message in consumer.messages:
        message.ack()
    consumer.until(lambda: leases(bare) == 0)


def test_idle_consumer_is_woken_by_a_push(both: StartConsumer, url: str) -> None:
    consumer = both("q")
    for count in range(1, 6):
        consumer.until_waiting()
        send(url, "q", str(count), priority=0 if count % 2 else 6)
        consumer.get(count)
    assert consumer.texts == list("12345")


def test_consumer_of_kombu_on_the_same_queue_is_still_served(
    consume: StartConsumer, url: str, bare: Any
) -> None:
    stock = consume("q", transport="kombu.transport.redis:Transport")
    stock.turn()
    consumer = consume("q")
    consumer.until_waiting()
    send(url, "q", "one")
    stock.until(lambda: stock.messages or consumer.messages)
    consumer.turn()
    assert stock.texts == ["one"]
    assert consumer.texts == []


def test_reject_drops_or_requeues(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", "dropped", "again", "other")
    consumer = both("q", prefetch=3)
    consumer.get(3)
    consumer.messages[0].reject()
    consumer.messages[1].requeue()
    consumer.get(4)
    assert consumer.texts == ["dropped", "again", "other", "again"]
    for message in consumer.messages[2:]:
        message.ack()
    consumer.until(lambda: leases(bare) == 0)
    assert waiting(bare) == 0


def test_the_prefetch_is_a_limit(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", *"123456")
    consumer = both("q", prefetch=2)
    consumer.get(2)
    for _ in range(5):
        consumer.turn()
    assert consumer.texts == ["1", "2"]
    assert leases(bare) == 2
    consumer.messages[0].ack()
    consumer.get(3)
    consumer.channel.basic_qos(0, 6, False)
    assert consumer.get(6) == list("123456")


def test_malformed_messages_do_not_use_up_the_prefetch(
    both: StartConsumer, url: str, bare: Any
) -> None:
    consumer = both("q", prefetch=2)
    for _ in range(5):
        bare.lpush("q", "not json")
    send(url, "q", *"123")
    consumer.get(2)
    consumer.turn()
    assert consumer.texts == ["1", "2"]
    assert bare.hlen(KEYS.dead) == 5


def test_an_acknowledgement_of_another_thread_makes_room_at_once(
    consume: StartConsumer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Celery's pool of threads: no timer may be what moves work on."""
    monkeypatch.setattr("batchery.transport.SWEEP_INTERVAL_S", 60.0)
    send(url, "q", *[str(number) for number in range(100)])
    consumer = consume("q", hub=True, prefetch=1)
    loop = threading.Thread(target=consumer.hub.run_forever)
    loop.start()
    try:
        for _ in range(100):
            # Without a wake-up each of them waits for the loop's own poll, a second or more.
            wait_for(lambda: consumer.messages, "the next one")
            consumer.messages.pop().ack()
    finally:
        consumer.hub.stop()
        consumer.hub.call_soon(lambda: None)
        loop.join()


def test_a_queue_has_its_share_and_no_more(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "large", *"12345")
    consumer = both("large", "small", prefetch=10, queue_prefetch={"large": 2})
    consumer.get(2)
    consumer.until_waiting()
    send(url, "small", "6")
    consumer.get(3)
    assert consumer.texts == ["1", "2", "6"]
    consumer.until_waiting()
    consumer.messages[0].ack()
    assert consumer.get(4) == ["1", "2", "6", "3"]


def test_each_class_has_its_part_and_no_more(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", *"12345", priority=9)
    send(url, "ordinary", *"67")
    consumer = both(
        "q", "ordinary", prefetch=6, class_levels=[0, 3, 6], ordinary_queues=["ordinary"]
    )
    assert sorted(consumer.get(4)) == ["1", "2", "6", "7"]
    consumer.until_waiting()
    # What was taken of one class does not keep out the others.
    send(url, "q", "live")
    send(url, "q", "soon", priority=4)
    consumer.get(6)
    assert sorted(consumer.texts[4:]) == ["live", "soon"]
    for message in consumer.messages:
        if message.payload == "1":
            message.ack()
    consumer.get(7)
    assert consumer.texts[-1] == "3"


def test_a_fetch_leaves_something_to_others(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", *"12345")
    left: list[int] = []
    consumer = both("q", fetch_messages=2)

    def look(message: Any) -> None:
        consumer.messages.append(message)
        left.append(waiting(bare))

    consumer.consumer.on_message = look
    assert consumer.get(5) == list("12345")
    assert left == [3, 3, 1, 1, 0]


def test_without_acknowledgements_nothing_is_kept(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", "1", "2")
    consumer = both("q", no_ack=True)
    assert consumer.get(2) == ["1", "2"]
    assert bare.keys("batchery:*") == []


def test_a_queue_is_added_while_it_waits(both: StartConsumer, url: str) -> None:
    consumer = both("q")
    consumer.until_waiting()
    consumer.consumer.add_queue(find_queue("new"))
    consumer.consumer.consume()
    send(url, "new", "1")
    assert consumer.get(1) == ["1"]
    consumer.messages[0].ack()


def test_a_queue_is_cancelled_while_it_waits(both: StartConsumer, url: str, bare: Any) -> None:
    consumer = both("q", "other")
    consumer.until_waiting()
    consumer.consumer.cancel_by_queue("q")
    send(url, "q", "1")
    send(url, "other", "2")
    assert consumer.get(1) == ["2"]
    assert waiting(bare) == 1


def test_message_for_a_cancelled_queue_is_given_back(
    both: StartConsumer, url: str, bare: Any
) -> None:
    send(url, "q", "1", "2")
    send(url, "other", "3")
    consumer = both("q", "other")
    consumer.channel.connection.cycle.on_poll_start()
    consumer.consumer.cancel_by_queue("q")
    assert consumer.get(1) == ["3"]
    with contextlib.closing(Consumer(url, "q")) as another:
        assert another.get(2) == ["1", "2"]


def test_close_gives_back_in_order(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", *"12345")
    consumer = both("q")
    consumer.get(5)
    consumer.messages[1].ack()
    consumer.close()
    assert waiting(bare) == 4
    assert {*bare.keys("batchery:*")} == {b"batchery:token", b"batchery:schema"}
    with contextlib.closing(Consumer(url, "q")) as another:
        assert another.get(4) == ["1", "3", "4", "5"]


def test_purge_and_size(consume: StartConsumer, url: str) -> None:
    consumer = consume("other")
    send(url, "q", "1", "2")
    send(url, "q", "3", priority=9)
    assert consumer.channel.queue_declare("q").message_count == 3
    assert consumer.channel.queue_purge("q") == 3
    assert consumer.channel.queue_declare("q").message_count == 0


def test_fanout(both: StartConsumer, url: str, bare: Any) -> None:
    import kombu

    consumer = both("q")
    exchange = kombu.Exchange("news", type="fanout", durable=False)
    consumer.consumer.no_ack = True
    # As the queue of a worker's remote control.
    queue = kombu.Queue("mine", exchange, auto_delete=True, expires=300)
    consumer.consumer.add_queue(queue).declare()
    consumer.consumer.consume()
    consumer.until_waiting()
    with kombu.Connection(url) as connection, connection.Producer() as producer:

        def hear() -> bool:
            producer.publish("hello", exchange=exchange, declare=[exchange], serializer="json")
            return bool(consumer.messages)

        consumer.until(hear)
    assert consumer.texts[0] == "hello"
    # Kombu has a table of them, which keeps the name of each worker that was ever killed.
    assert sorted(bare.keys("_kombu.binding.*")) == [b"_kombu.binding.q"]
    send(url, "q", "a job")
    consumer.until(lambda: "a job" in consumer.texts)


def test_global_keyprefix(both: StartConsumer, url: str, bare: Any) -> None:
    options = {"global_keyprefix": "mine:"}
    send(url, "q", "1", "2", options=options)
    send(url, "q", "not mine")
    send(url, "q", "3", options=options, priority=9)
    consumer = both("q", **options)
    assert consumer.get(3) == ["1", "2", "3"]
    assert bare.hlen(bare.keys("mine:batchery:lease:*")[0]) == 3
    consumer.until_waiting()
    send(url, "q", "4", options=options)
    consumer.get(4)
    consumer.close()
    assert waiting(bare, "mine:q") == 3
    assert waiting(bare) == 1


def test_another_database(both: StartConsumer, url: str) -> None:
    there = url.replace("/0", "/3")
    send(url, "q", "elsewhere")
    consumer = both("q", to=there)
    consumer.until_waiting()
    send(there, "q", "1")
    assert consumer.get(1) == ["1"]


def test_a_wrong_type_of_key_does_not_keep_it_busy(
    both: StartConsumer, url: str, bare: Any
) -> None:
    consumer = both("q", "strange")
    consumer.until_waiting()
    bare.set("strange", "no list")
    send(url, "q", "1")
    assert consumer.get(1) == ["1"]
    consumer.until_waiting()
    before = bare.info("stats")["total_commands_processed"]
    for _ in range(5):
        consumer.turn()
    assert bare.info("stats")["total_commands_processed"] - before < 100


def test_two_channels_of_one_process_do_not_disturb_each_other(
    both: StartConsumer, url: str, bare: Any
) -> None:
    first, second = both("q", prefetch=2), both("q", prefetch=2)
    send(url, "q", *"1234")
    first.get(2)
    second.get(2)
    first.close()
    assert leases(bare) == 2
    assert bare.zcard(KEYS.workers) == 1
    for message in second.messages:
        message.ack()
    assert second.get(4)[2:] == first.texts


def test_a_fenced_consumer_begins_anew(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", "1", "2")
    consumer = both("q", prefetch=2, lease_expiry_s=0.5)
    consumer.get(2)
    for worker in bare.zrange(KEYS.workers, 0, -1):
        bare.zrem(KEYS.workers, worker)
    # It is found out though there is no room for more.
    with pytest.raises(redis.ConnectionError, match="2 jobs were handed on"):
        consumer.until(lambda: False)
    consumer.break_connection()
    consumer.open("q")
    assert consumer.get(2) == ["1", "2"]
    for message in consumer.messages:
        message.ack()
    consumer.until(lambda: leases(bare) == 0)


def test_leases_can_be_switched_off(both: StartConsumer, url: str, bare: Any) -> None:
    send(url, "q", "1")
    consumer = both("q", leases=False)
    consumer.get(1)
    assert bare.hlen("unacked") == 1
    assert bare.keys("batchery:*") == []


def test_messages_that_nobody_notes_as_taken_are_not_leased(
    both: StartConsumer, url: str, bare: Any
) -> None:
    send(url, "q", "1", "2")
    consumer = both("q", ack_emulation=False)
    assert consumer.get(2) == ["1", "2"]
    consumer.messages[0].ack()
    assert bare.keys("unacked*") == bare.keys("batchery:*") == []


def test_an_idle_consumer_rarely_asks(both: StartConsumer, url: str, bare: Any) -> None:
    consumer = both("a", "b", "c", "d")
    consumer.until_waiting()
    before = bare.info("stats")["total_commands_processed"]
    began_s = time.monotonic()
    consumer.until(lambda: time.monotonic() > began_s + 1)
    assert bare.info("stats")["total_commands_processed"] - before < 40
