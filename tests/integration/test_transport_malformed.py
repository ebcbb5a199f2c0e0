"""Whatever is pushed into a queue: it becomes a dead letter, and what follows is served."""

import contextlib
import json
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from apps import shop
from batchery import BatchTask, InvalidItem, install
from batchery.transport import dead_letters
from batchery.transport.redis_schema import Keys
from conftest import StartWorker
from support.harness import unsettled, wait_for
from support.lessee import Lessee
from support.own_redis import OwnRedis
from support.patience import patient
from support.plain_kombu import send

KEYS = Keys()

TIMEOUT_S = patient(30.0)

#: Deep enough for any parser that recurses.
DEEP = 1_000_000

MALFORMED = {
    "empty": b"",
    "no json": b"not json",
    "a number": b"7",
    "a list": b"[1, 2]",
    "a text": b'"text"',
    "null": b"null",
    "no properties": b'{"body": "e30=", "headers": {}}',
    "properties of another kind": b'{"body": "e30=", "properties": [1]}',
    "no base64": b'{"body": "e30", "properties": {"body_encoding": "base64"}}',
    "a body of another kind": b'{"body": 7, "properties": {"body_encoding": "base64"}}',
    "an unknown encoding": b'{"body": "e30=", "properties": {"body_encoding": "rot13"}}',
    "no unicode": b'{"body": "e30=", "properties": {}, "headers": {"id": "\xff\xfe"}}',
    "a million levels": b"[" * DEEP + b"]" * DEEP,
    "a million levels of mappings": b'{"a":' * DEEP,
    "huge": b"x" * 20_000_000,
    "a zero byte": b"\0{}",
}


def test_malformed_messages_are_dead_letters_and_hold_up_nothing(
    every_redis: OwnRedis, start_worker: StartWorker
) -> None:
    queue, url = shop.shout.name, every_redis.url
    with Redis.from_url(url) as bare, Celery("c", broker=url, backend=url) as client:
        bare.flushall()
        for message in MALFORMED.values():
            bare.lpush(queue, message)
        job = client.send_task(queue, ["job"], queue=queue)
        start_worker("apps.shop", env={"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url})
        assert job.get(timeout=TIMEOUT_S) == "JOB"
        wait_for(lambda: unsettled(url) == 0, "all are settled")
        messages = [value.partition(b"\0") for value in bare.hvals(KEYS.dead_messages)]
        assert sorted(message for _, _, message in messages) == sorted(MALFORMED.values())
        assert {key for key, _, _ in messages} == {queue.encode()}
        letters: list[Any] = bare.hvals(KEYS.dead)
        assert len(letters) == len(MALFORMED)
        for letter in letters:
            reason = json.loads(letter.partition(b"\0")[2])["reason"]
            assert reason.startswith(
                ("the message cannot be understood: ", "the message is no job: ")
            )
            assert len(reason) <= 1000


def test_a_message_that_is_too_large_is_kept_and_not_read(
    every_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_MESSAGE_BYTES", 2000)
    with Redis.from_url(every_redis.url) as bare:
        bare.flushall()
        send(every_redis.url, "q", "x" * 2000, "job")
        with contextlib.closing(Lessee(every_redis.url, "q")) as lessee:
            assert lessee.get(1) == ["job"]
            lessee.ack(0)
            assert not bare.keys("batchery:lease:*")
        [value] = bare.hvals(KEYS.dead)
        letter = json.loads(value.partition(b"\0")[2])
        assert "the maximum is 2,000" in letter["reason"]
        assert letter["id"] is None


def test_a_message_that_no_worker_would_read_is_not_sent(
    every_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_MESSAGE_BYTES", 2000)
    app = Celery("large", broker=every_redis.url, backend=every_redis.url, set_as_current=False)
    with install(app), Redis.from_url(every_redis.url) as bare:
        bare.flushall()

        @app.task(base=BatchTask, shared=False)
        def lengths(texts: list[str]) -> list[int]:
            return [len(text) for text in texts]

        with pytest.raises(InvalidItem, match=r"has [23],\d+ bytes, and the maximum is 2,000"):
            lengths.delay("x" * 2000)
        assert not bare.llen(lengths.name)
        lengths.delay("x" * 1000)
        assert bare.llen(lengths.name) == 1
