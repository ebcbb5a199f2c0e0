"""How a device leases messages, on every redis-server that there is."""

import contextlib
import time
from typing import Any

import pytest

from batchery.transport.redis_schema import Keys
from batchery_worker.device import redis_source
from support.harness import wait_for
from support.lessee import Lessee, StartLessee
from support.plain_kombu import leases, send, waiting

KEYS = Keys()


def test_waiting_messages_are_leased_in_order_and_settled(
    lease: StartLessee, url: str, bare: Any
) -> None:
    send(url, "q", *"12345")
    lessee = lease("q")
    assert lessee.get(5) == list("12345")
    assert [leases(bare), waiting(bare)] == [5, 0]
    for at in range(5):
        lessee.ack(at)
    assert leases(bare) == 0


def test_a_device_that_waits_is_woken_by_a_push(
    lease: StartLessee, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wake-up, the look at all queues would find the job only after the time limit."""
    monkeypatch.setattr(redis_source, "SWEEP_INTERVAL_S", 600.0)
    lessee = lease("q")
    for count in range(1, 6):
        lessee.until_waiting()
        send(url, "q", str(count), priority=0 if count % 2 else 6)
        lessee.turn(600.0)
        lessee.get(count)
    assert lessee.texts == list("12345")


def test_no_more_is_taken_than_there_is_room_for(lease: StartLessee, url: str, bare: Any) -> None:
    send(url, "q", *"123456")
    lessee = lease("q", room=2)
    lessee.get(2)
    for _ in range(5):
        lessee.turn()
    assert lessee.texts == ["1", "2"]
    assert leases(bare) == 2
    lessee.ack(0)
    lessee.get(3)


def test_two_devices_of_one_worker_do_not_disturb_each_other(
    lease: StartLessee, url: str, bare: Any
) -> None:
    first, second = lease("q", room=2), lease("q", room=2)
    send(url, "q", *"1234")
    first.get(2)
    second.get(2)
    first.close()
    assert leases(bare) == 2
    assert bare.zcard(KEYS.workers) == 1
    for at in range(2):
        second.ack(at)
    assert second.get(4)[2:] == first.texts


def test_close_gives_back_in_order(lease: StartLessee, url: str, bare: Any) -> None:
    send(url, "q", *"12345")
    lessee = lease("q")
    lessee.get(5)
    lessee.ack(1)
    lessee.close()
    assert waiting(bare) == 4
    assert {*bare.keys("batchery:*")} == {b"batchery:token", b"batchery:schema"}
    with contextlib.closing(Lessee(url, "q")) as another:
        assert another.get(4) == ["1", "3", "4", "5"]


def test_global_keyprefix(lease: StartLessee, url: str, bare: Any) -> None:
    options = {"global_keyprefix": "mine:"}
    send(url, "q", "1", "2", options=options)
    send(url, "q", "not mine")
    send(url, "q", "3", options=options, priority=9)
    lessee = lease("q", **options)
    assert lessee.get(3) == ["1", "2", "3"]
    assert bare.hlen(bare.keys("mine:batchery:lease:*")[0]) == 3
    lessee.until_waiting()
    send(url, "q", "4", options=options)
    lessee.get(4)
    lessee.close()
    assert waiting(bare, "mine:q") == 3
    assert waiting(bare) == 1


def test_another_database(lease: StartLessee, url: str) -> None:
    there = url.replace("/0", "/3")
    send(url, "q", "elsewhere")
    lessee = lease("q", to=there)
    lessee.until_waiting()
    send(there, "q", "1")
    assert lessee.get(1) == ["1"]


def test_a_wrong_type_of_key_does_not_keep_it_busy(lease: StartLessee, url: str, bare: Any) -> None:
    lessee = lease("q", "strange")
    lessee.until_waiting()
    bare.set("strange", "no list")
    send(url, "q", "1")
    assert lessee.get(1) == ["1"]
    lessee.until_waiting()
    before = bare.info("stats")["total_commands_processed"]
    for _ in range(5):
        lessee.turn()
    assert bare.info("stats")["total_commands_processed"] - before < 100


def test_an_idle_device_rarely_asks(lease: StartLessee, url: str, bare: Any) -> None:
    lessee = lease("a", "b", "c", "d")
    lessee.until_waiting()
    before = bare.info("stats")["total_commands_processed"]
    began_s = time.monotonic()
    while time.monotonic() < began_s + 1:
        lessee.turn(2.0)
    # One look at 36 lists, in the script.
    assert bare.info("stats")["total_commands_processed"] - before < 100


def test_a_fenced_device_begins_anew(lease: StartLessee, url: str, bare: Any) -> None:
    send(url, "q", "1", "2")
    lessee = lease("q")
    lessee.get(2)
    joined: list[str] = []
    lessee.source.listeners.on_joined = lambda holder, _: joined.append(holder)
    before = lessee.store.worker
    for worker in bare.zrange(KEYS.workers, 0, -1):
        bare.zrem(KEYS.workers, worker)
    lessee.held.clear()
    lessee.turn()
    # Its worker says so, whose heartbeats find it out, too.
    lessee.source.fence(before)
    assert lessee.get(4) == ["1", "2", "1", "2"]
    assert joined == [lessee.store.worker] != [before]


def test_messages_of_a_lost_answer_are_delivered(lease: StartLessee, url: str, bare: Any) -> None:
    lessee = lease("q")
    lessee.until_waiting()
    send(url, "q", *"123")
    assert lessee.source.ask()
    wait_for(lambda: leases(bare) == 3, "Redis has answered")
    lessee.source._redis.disconnect()
    assert lessee.get(3) == list("123")
    assert all(each["headers"]["redelivered"] for each in lessee.messages)
    # Only what is not here already comes again.
    lessee.source._redis.disconnect()
    send(url, "q", "4")
    assert lessee.get(4) == list("1234")


def test_a_key_that_something_else_has_written_is_named(
    lease: StartLessee, bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lessee = lease("q")
    bare.lpush(KEYS.suspects, "no hash")
    bare.lpush("q", "wakes it")
    lessee.until(lambda: caplog.text)
    assert "key batchery:suspects of Redis is a list, not a hash" in caplog.text
    assert "redis-cli DEL batchery:suspects" in caplog.text
    bare.delete(KEYS.suspects)  # Or the lessee could not leave, either.
