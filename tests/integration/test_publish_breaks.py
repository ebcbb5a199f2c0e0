"""Publishing when something is in the way: lost answers, a full queue, a Redis that refuses."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import redis
from celery import Celery, uuid

from batchery import BrokerRefused, QueueFull
from batchery.retry import RetryPolicy
from batchery_producer import broker
from batchery_producer.publisher import CHUNK_JOBS, Publisher
from support.harness import wait_for
from support.own_redis import OwnRedis
from support.publishing import bulk_app


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    """On each kind of Redis in turn."""
    with bulk_app(url) as made:
        yield made


def limit(max_waiting: int) -> dict[str, Any]:
    """The settings of an app whose jobs are of one class, of which so many may wait."""
    return {"batchery_classes": {"all": {"level": 0, "share": 1, "max_waiting": max_waiting}}}


def jobs(count: int, begin: int = 0) -> list[tuple[str, Any]]:
    return [(f"job-{number}", "item") for number in range(begin, begin + count)]


def ids(bare: Any, key: str = "same") -> list[str]:
    """Of the messages in a list, in the order in which they will be taken."""
    return [json.loads(raw)["headers"]["id"] for raw in reversed(bare.lrange(key, 0, -1))]


@pytest.fixture
def lose_answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the next answers to pushes never arrive, whatever connection they come by."""

    def lose(count: int) -> None:
        push, left = broker.BrokerConnection.push, iter(range(count))

        def push_and_lose(self: Any, *words: Any) -> Any:
            answer = push(self, *words)
            if next(left, None) is not None:
                raise redis.ConnectionError("Connection closed by server.")
            return answer

        monkeypatch.setattr(broker.BrokerConnection, "push", push_and_lose)

    return lose


def test_a_chunk_whose_answer_was_lost_is_in_the_queue_once(
    app: Celery, bare: Any, lose_answers: Any
) -> None:
    lose_answers(3)
    sent = jobs(CHUNK_JOBS + 5)
    with Publisher(app, "same") as publisher:
        publisher.send(sent)
        assert publisher.sent == len(sent)
    assert ids(bare) == [task_id for task_id, _ in sent]


def test_a_lost_answer_does_not_hide_how_little_had_fitted(
    url: str, bare: Any, lose_answers: Any
) -> None:
    lose_answers(1)
    with bulk_app(url, **limit(3)) as app, Publisher(app, "same", wait_s=0) as publisher:
        with pytest.raises(QueueFull) as caught:
            publisher.send(jobs(5))
        assert caught.value.sent == publisher.sent == 3
    assert ids(bare) == ["job-0", "job-1", "job-2"]


def test_a_restart_of_redis_in_between_loses_and_doubles_nothing(own_redis: OwnRedis) -> None:
    with bulk_app(own_redis.url) as app, Publisher(app, "same") as publisher:
        publisher.send(jobs(10))
        own_redis.kill()
        again = threading.Timer(0.5, own_redis.start)
        again.start()
        publisher.send(jobs(10, begin=10))
        again.join()
        with redis.Redis.from_url(own_redis.url) as bare:
            assert ids(bare) == [f"job-{number}" for number in range(20)]


def test_a_redis_without_memory_refuses_and_has_nothing(app: Celery, bare: Any) -> None:
    with Publisher(app, "same") as publisher:
        publisher.send(jobs(1))
        bare.config_set("maxmemory", 1)
        with pytest.raises(BrokerRefused, match="has no memory left") as caught:
            publisher.send(jobs(2))
        assert caught.value.sent == 0
        bare.config_set("maxmemory", 0)
        publisher.send(jobs(1, begin=1))
    assert ids(bare) == ["job-0", "job-1"]


def test_a_patient_publisher_waits_for_memory(app: Celery, bare: Any) -> None:
    bare.config_set("maxmemory", 1)
    again = threading.Timer(0.3, bare.config_set, ("maxmemory", 0))
    again.start()
    patient = broker.BrokerConnection(app, RetryPolicy(), persistent=True)
    with closing(patient), Publisher(app, "same", broker=patient) as publisher:
        publisher.send(jobs(2))
    again.join()
    assert ids(bare) == ["job-0", "job-1"]


@pytest.mark.parametrize("warm", [True, False])
def test_a_replica_refuses(app: Celery, bare: Any, warm: bool) -> None:
    with Publisher(app, "same") as publisher:
        if warm:
            publisher.send(jobs(1))
        bare.replicaof("127.0.0.1", 1)  # Nobody listens there.
        try:
            with pytest.raises(BrokerRefused, match="is a replica"):
                publisher.send(jobs(1))
        finally:
            bare.replicaof("NO", "ONE")


def test_a_key_that_is_no_queue_is_refused_again_and_again(app: Celery, bare: Any) -> None:
    bare.set("same", "mine")
    with Publisher(app, "same") as publisher:
        for _ in range(2):
            with pytest.raises(
                BrokerRefused, match="has a value under this key that is not a queue"
            ):
                publisher.send(jobs(1))
        bare.delete("same")
        publisher.send(jobs(1))
    assert ids(bare) == ["job-0"]


def test_a_queue_holds_as_many_as_it_may(url: str, bare: Any) -> None:
    bare.lpush("same", "a stranger's")
    bare.lpush("same\x06\x163", "another")
    with (
        bulk_app(url, **limit(5)) as app,
        Publisher(app, "same", wait_s=0, priority=6) as publisher,
    ):
        publisher.send(jobs(2))
        with pytest.raises(QueueFull, match="holds 5 jobs, and max_waiting is 5") as caught:
            publisher.send(jobs(3, begin=2))
    assert caught.value.sent == 1
    assert caught.value.retry_after_s > 0
    assert ids(bare, "same\x06\x166") == ["job-0", "job-1", "job-2"]


def test_a_publisher_that_waits_goes_on_when_there_is_room(url: str, bare: Any) -> None:
    taken: list[str] = []

    def is_full() -> bool:
        return bool(bare.llen("same") == min(4, 10 - len(taken)))

    with bulk_app(url, **limit(4)) as app, Publisher(app, "same") as publisher:
        thread = threading.Thread(target=publisher.send, args=(jobs(10),))
        thread.start()
        while len(taken) < 10:
            wait_for(is_full, "the queue is full again")
            taken += [json.loads(raw)["headers"]["id"] for raw in bare.rpop("same", 4)]
        thread.join()
    assert taken == [task_id for task_id, _ in jobs(10)]


@pytest.mark.parametrize("used", [0, 1])
def test_each_forked_process_sends_all_its_jobs(app: Celery, bare: Any, used: int) -> None:
    """A server may make its publisher, or a client, before it forks its workers."""
    publisher = Publisher(app, "same")
    publisher.send(jobs(used))
    for begin in (10, 20):
        child = os.fork()
        if not child:
            with suppress(Exception):
                publisher.send(jobs(2, begin=begin))
            os._exit(0)
        os.waitpid(child, 0)
    publisher.send(jobs(1, begin=30))
    publisher.close()
    sent = [*range(used), 10, 11, 20, 21, 30]
    assert ids(bare) == [f"job-{number}" for number in sent]


def test_a_key_prefix_is_kept(url: str, bare: Any) -> None:
    with (
        bulk_app(url, broker_transport_options={"global_keyprefix": "mine."}, **limit(2)) as app,
        Publisher(app, "same", wait_s=0) as publisher,
    ):
        with pytest.raises(QueueFull):
            publisher.send([(uuid(), "one"), (uuid(), "two"), (uuid(), "three")])
        assert all(key.startswith(b"mine.") for key in bare.scan_iter())
        assert bare.llen("mine.same") == 2
