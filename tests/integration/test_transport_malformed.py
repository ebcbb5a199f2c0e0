"""Whatever is pushed into a queue: it becomes a dead letter, and what follows is served."""

import contextlib
import json

import pytest
from celery import Celery
from redis import Redis

from batchery import BatchTask, InvalidItem, install
from batchery.transport import dead_letters
from batchery.transport.redis_schema import Keys
from support.lessee import Lessee
from support.own_redis import OwnRedis
from support.plain_kombu import send

KEYS = Keys()


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
