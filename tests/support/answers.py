"""Counts how often the result of a job is stored."""

import json
from collections import Counter
from typing import Any, Self

from redis import Redis

from support.harness import wait_for


class Answers:
    """The results that are stored while the block runs, also one that replaces another.

    Celery's backend for Redis publishes each of them under its key.
    """

    def __init__(self, redis_url: str) -> None:
        redis: Any = Redis.from_url(redis_url)
        self._redis, self._channel = redis, redis.pubsub()
        self._states: dict[str, Counter[str]] = {}

    def __enter__(self) -> Self:
        self._channel.psubscribe("*celery-task-meta-*")
        wait_for(lambda: self._channel.get_message(timeout=0.1), "the subscription holds")
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._redis.close()

    def states(self, task_id: str) -> Counter[str]:
        """How often each state of a job was stored."""
        while message := self._channel.get_message(ignore_subscribe_messages=True):
            meta = json.loads(message["data"])
            self._states.setdefault(meta["task_id"], Counter())[meta["status"]] += 1
        return self._states.get(task_id, Counter())
