"""Resuming: finds the jobs of an earlier process of the same run that are still in flight.

A job moves one way only: from its queue to a worker, then to a result. A search in this order finds
every job; it may find a job twice that moves meanwhile.
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
from batchery_producer.retry import RetryPolicy

#: Number of messages that are read from Redis at a time.
CHUNK = 256

#: How long workers may take to name their active jobs, in seconds.
ASK_S = 1.0

#: Errors after which to retry.
ERRORS = (redis.ConnectionError, redis.TimeoutError, OSError, OperationalError)


class InFlightRecovery:
    """Determines which jobs must be sent again."""

    def __init__(
        self,
        app: Celery,
        queue: str,
        pattern: "re.Pattern[bytes]",
        max_in_flight: int,
        retries: RetryPolicy,
    ) -> None:
        """Prepares; the first call of `missing` looks for jobs that have no result yet.

        Args:
            app: App whose broker and backend to search.
            queue: Queue to which the jobs were sent.
            pattern: Matches the ids of the run in a message.
            max_in_flight: Maximum number of the run's jobs that can have been in flight.
            retries: How long to retry when Redis is away.
        """
        self._app = app
        self._queue = queue
        self._pattern = pattern
        self._max_in_flight = max_in_flight
        self._missing_in_a_row = 0
        self._retries = retries
        self._in_flight: set[str] | None = None

    def missing(self, task_ids: Sequence[str]) -> list[str]:
        """Jobs out of some, the oldest first, that are neither in flight nor ended.

        A run sends its jobs in the order of the input. So when as many jobs in a row are missing as
        can have been in flight, none of the following was sent, and this stops searching.

        Raises:
            Interrupted: The caller asked to stop.
            GaveUp: Redis stays away.
        """
        if self._missing_in_a_row >= self._max_in_flight:
            return list(task_ids)
        if self._in_flight is None:
            self._in_flight = self._retries.call(self._find, ERRORS)
        absent = [task_id for task_id in task_ids if task_id not in self._in_flight]
        ended = self._retries.call(lambda: set(_ended(self._app, absent)), ERRORS)
        missing = [task_id for task_id in absent if task_id not in ended]
        self._missing_in_a_row = (
            self._missing_in_a_row + len(missing) if missing == list(task_ids) else 0
        )
        return missing

    def _find(self) -> set[str]:
        return set(_find_in_flight(self._app, self._queue, self._pattern))


def _find_in_flight(app: Celery, queue: str, pattern: "re.Pattern[bytes]") -> Iterator[str]:
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        if not isinstance(channel, kombu_redis.Channel):
            # The queues of other brokers cannot be searched, so their jobs are sent again.
            return
        for message in _messages(channel, queue):
            yield from (found.decode() for found in pattern.findall(message))
    # Jobs of ordinary tasks are in no list of Redis while they run.
    active = app.control.inspect(timeout=ASK_S).active() or {}
    yield from (
        found.decode()
        for jobs in active.values()
        for found in pattern.findall(json.dumps([each.get("id") for each in jobs]).encode())
    )


def _messages(channel: Any, queue: str) -> Iterator[bytes]:
    """Messages in the queue, then those of workers: Batchery's leases, and Celery's unacked."""
    # kombu's own client would add its key prefix to some keys only.
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
    """Messages, the newest first, so that none is skipped while the oldest leave."""
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
