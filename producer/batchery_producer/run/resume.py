"""Survivors: jobs that an earlier process of the same run has sent, and that have not ended.

A job moves one way only: from its queue to a worker, then to a result. Whoever looks in this order
finds every job that there is; one that moves meanwhile may be found twice.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import redis
from celery import Celery, states
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis

from batchery.transport.redis_schema import Keys
from batchery_producer.retry import Patience

#: Messages that are read from Redis at a time.
CHUNK = 256

#: How long workers may take to say what they execute, in seconds.
ASK_S = 1.0

#: What is worth another attempt.
ERRORS = (redis.ConnectionError, redis.TimeoutError, OSError, OperationalError)


class Survivors:
    """Tells which jobs need not be sent again."""

    def __init__(
        self,
        app: Celery,
        queue: str,
        pattern: "re.Pattern[bytes]",
        most: int,
        patience: Patience,
    ) -> None:
        """Prepares; the first question looks for jobs that have no result yet.

        Args:
            app: Whose broker and backend to look at.
            queue: Where the jobs were sent.
            pattern: Finds the ids of the run in a message.
            most: How many of the run's jobs can have been in flight.
            patience: For a Redis that goes away.
        """
        self._app = app
        self._queue = queue
        self._pattern = pattern
        self._most = most
        self._lost_in_a_row = 0
        self._patience = patience
        self._alive: set[str] | None = None

    def lost(self, task_ids: Sequence[str]) -> list[str]:
        """Those of some jobs, the oldest first, that must be sent.

        A run sends its jobs in the order of the input: when so many in a row are lost as can have
        been in flight, none of the following was sent, and nothing more is asked.

        Raises:
            Interrupted: The patience was asked to stop.
            GaveUp: Redis stays away.
        """
        if self._lost_in_a_row >= self._most:
            return list(task_ids)
        if self._alive is None:
            self._alive = self._patience.call(self._look, ERRORS)
        absent = [task_id for task_id in task_ids if task_id not in self._alive]
        ended = self._patience.call(lambda: set(_ended(self._app, absent)), ERRORS)
        lost = [task_id for task_id in absent if task_id not in ended]
        self._lost_in_a_row = self._lost_in_a_row + len(lost) if lost == list(task_ids) else 0
        return lost

    def _look(self) -> set[str]:
        return set(_alive(self._app, self._queue, self._pattern))


def _alive(app: Celery, queue: str, pattern: "re.Pattern[bytes]") -> Iterator[str]:
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        if not isinstance(channel, kombu_redis.Channel):
            # Nobody can look into the queues of other brokers: their jobs are sent again.
            return
        for message in _messages(channel, queue):
            yield from (found.decode() for found in pattern.findall(message))
    # Jobs of ordinary tasks are in no queue while they run.
    active = app.control.inspect(timeout=ASK_S).active() or {}
    yield from (
        found.decode()
        for jobs in active.values()
        for found in pattern.findall(json.dumps([each.get("id") for each in jobs]).encode())
    )


def _messages(channel: Any, queue: str) -> Iterator[bytes]:
    """What waits in the queue, then what workers hold: Batchery's leases, and Celery's unacked."""
    # Kombu's own client would put the prefix before some keys and not before others.
    client = redis.Redis(connection_pool=channel.pool)
    prefix = channel.global_keyprefix
    for step in channel.priority_steps:
        yield from _waiting(client, prefix + channel._q_for_pri(queue, step))
    keys = Keys(prefix)
    held = [keys.lease(_text(worker)) for worker in client.zrange(keys.workers, 0, -1)]
    for key in (*held, prefix + channel.unacked_key):
        for _, value in client.hscan_iter(key, count=CHUNK):
            yield value


def _waiting(client: Any, key: str) -> Iterator[bytes]:
    """From the young end, where new ones come: so none is passed over while others are taken."""
    start = 0
    while messages := client.lrange(key, start, start + CHUNK - 1):
        yield from messages
        start += len(messages)


def _ended(app: Celery, task_ids: Iterable[str]) -> Iterator[str]:
    ids = list(task_ids)
    backend: Any = app.backend
    if not isinstance(backend, RedisBackend):
        yield from (each for each in ids if AsyncResult(each, app=app).ready())
        return
    for start in range(0, len(ids), CHUNK):
        some = ids[start : start + CHUNK]
        stored = backend.client.mget([backend.get_key_for_task(each) for each in some])
        for task_id, value in zip(some, stored, strict=True):
            if value is not None and backend.decode(value).get("status") in states.READY_STATES:
                yield task_id


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
