"""Where a worker's devices lease jobs, for parts of it that go to Redis themselves."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from celery import Celery

from batchery.shards import Shard, list_shards
from batchery.transport import SentinelTransport, Transport


def list_places(app: Celery) -> Sequence[Shard]:
    """Where the jobs of an app are: its shards, or its brokers, of which one is used at a time.

    All Sentinels of a list name the same one.
    """
    shards = list_shards(app)
    if shards[0].is_apart:
        return shards
    with app.connection_for_read() as connection:
        alternatives = connection.alt or ()
        if len(alternatives) < 2 or "sentinel" in str(connection.transport_cls).lower():
            return shards
        return [Shard(each) for each in alternatives]


@contextlib.contextmanager
def open_channel(app: Celery, place: Shard) -> Iterator[Any]:
    """A channel to a shard, or to the first broker that answers; each address is tried once.

    Raises:
        redis.RedisError: It does not answer.
        OSError: The same.
    """
    with place.connect(app) as connection:
        if not place.is_apart:
            is_sentinel = "sentinel" in str(connection.transport_cls).lower()
            # Whatever Celery itself uses.
            transport: Any = SentinelTransport if is_sentinel else Transport
            connection = app.connection_for_read(place.url, transport=transport)
        with connection:
            connection.ensure_connection(
                max_retries=len(connection.alt or ()),
                interval_start=0,
                reraise_as_library_errors=False,
            )
            channel: Any = connection.channel()
            with contextlib.closing(channel):
                yield channel
