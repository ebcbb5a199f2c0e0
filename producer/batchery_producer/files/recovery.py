"""Which jobs of an earlier process are still in flight.

A job moves one way only: from its queue to a worker, then to a result. A search in this order finds
every job; it may find a job twice that moves meanwhile.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from kombu.transport.redis import Transport
from redis.exceptions import NoPermissionError

from batchery.errors import RedisUnavailable
from batchery.retry import RetryPolicy
from batchery.shards import Shard, shard_of
from batchery.transport.redis_schema import Keys, lists_of

#: Number of messages that are read from Redis at a time.
CHUNK = 256

#: How long workers may take to name their active jobs, in seconds.
ASK_S = 1.0

#: How long Redis may take for one command, in seconds; then it hangs.
COMMAND_S = 30.0

#: Errors after which to retry.
ERRORS = (redis.ConnectionError, redis.TimeoutError, OSError, OperationalError)


def find_in_flight(
    app: Celery, queue: str, pattern: "re.Pattern[bytes]", retries: RetryPolicy
) -> Collection[str]:
    """The jobs that wait or run.

    Args:
        app: App whose broker to search.
        queue: Queue to which the jobs were sent.
        pattern: Matches the ids of the run in a message.
        retries: How long to retry when Redis is away.

    Raises:
        RedisUnavailable: Its user may not read messages.
    """
    try:
        return retries.call(lambda: set(_find_in_flight(app, queue, pattern)), ERRORS)
    except NoPermissionError as error:
        raise RedisUnavailable(
            "the broker does not let its user look for jobs that wait or run, as a run that"
            f" goes on must: {error}; use the user `operator` of `batchery acl`"
        ) from error


def _find_in_flight(app: Celery, queue: str, pattern: "re.Pattern[bytes]") -> Iterator[str]:
    # Jobs of ordinary tasks are with the broker.
    places = [shard.connect(app) for shard in dict.fromkeys((shard_of(app, queue), Shard()))]
    # The queues of other brokers cannot be searched, so their jobs are sent again.
    servers = [each for each in places if issubclass(each.get_transport_cls(), Transport)]
    if not servers:
        return
    for connection in servers:
        with connection:
            limits: Any = connection.transport_options
            limits["socket_timeout"] = limits.get("socket_timeout") or COMMAND_S
            for message in _messages(connection.default_channel, queue):
                yield from (found.decode() for found in pattern.findall(message))
    # Jobs of ordinary tasks are in no list of Redis while they run.
    active = app.control.inspect(timeout=ASK_S).active() or {}
    ids = json.dumps([each.get("id") for jobs in active.values() for each in jobs])
    yield from (found.decode() for found in pattern.findall(ids.encode()))


def _messages(channel: Any, queue: str) -> Iterator[bytes]:
    """Messages in the queue, then those of workers: Batchery's leases, and Celery's unacked."""
    # kombu's own client would add its key prefix to some keys only.
    client: Any = redis.Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix)
    for name in lists_of(channel, queue):
        yield from _waiting(client, keys.queue(name))
    held = [keys.lease(_text(worker)) for worker in client.zrange(keys.workers, 0, -1)]
    for key in (*held, keys.queue(channel.unacked_key)):
        for _, value in client.hscan_iter(key, count=CHUNK):
            yield value


def _waiting(client: Any, key: str) -> Iterator[bytes]:
    """Messages, the newest first, so that none is skipped while the oldest leave."""
    start = 0
    while messages := client.lrange(key, start, start + CHUNK - 1):
        yield from messages
        start += len(messages)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
