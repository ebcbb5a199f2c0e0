"""Where the jobs of a queue are: with the app's broker, on another Redis, or on a cluster."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from kombu import Connection, pools

from batchery.broker_url import is_cluster
from batchery.installation import get_redis_url
from batchery.transport import ClusterTransport, SentinelTransport, Transport
from batchery.transport.cluster import SHARDS, find_shard, get_cluster
from batchery.transport.redis_schema import find_own

#: Transport option of connections to shards that are no broker of the app: the number of the shard.
SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Shard:
    """One Redis with all queues, or one shard of a cluster, with some of them."""

    #: Of the Redis or the cluster; None for the app's broker.
    url: str | None = None
    #: Its number in a cluster.
    number: int = 0
    #: Whether it is no broker of the app.
    is_apart: bool = False

    def describe(self, app: Celery) -> str:
        """How the log names it."""
        if is_cluster(self.url):
            return f"shard {self.number} of the cluster {get_cluster(str(self.url))}"
        with self.connect(app) as connection:
            return str(connection.as_uri())

    def connect(self, app: Celery, *, writes: bool = False) -> Connection:
        """Makes a connection of kombu's, which does not connect yet.

        Args:
            app: Its options of transport apply, too.
            writes: Whether it is for a producer, where the app has two URLs of brokers.
        """
        connect: Any = app.connection_for_write if writes else app.connection_for_read
        if not self.is_apart:
            return connect(self.url)  # type: ignore[no-any-return]
        if is_cluster(self.url):
            options = {"cluster_url": self.url, SHARD: self.number}
            return connect(  # type: ignore[no-any-return]
                "redis://", transport=ClusterTransport, transport_options=options, ssl=False
            )
        is_sentinel = urlsplit(self.url or "").scheme == "sentinel"
        transport = SentinelTransport if is_sentinel else Transport
        return connect(  # type: ignore[no-any-return]
            self.url, transport=transport, transport_options={SHARD: 0}, ssl=False
        )


def list_shards(app: Celery) -> Sequence[Shard]:
    """All shards in which the app's batch jobs may be."""
    url = get_redis_url(app)
    if url is None:
        return (Shard(),)
    numbers = range(SHARDS) if is_cluster(url) else range(1)
    return [Shard(url, number, is_apart=True) for number in numbers]


def shard_of(app: Celery, queue: str) -> Shard:
    """The shard with the jobs of a queue, or of a list beside it."""
    url = get_redis_url(app)
    if url is None:
        return Shard()
    number = find_shard(find_own(queue)) if is_cluster(url) else 0
    return Shard(url, number, is_apart=True)


@contextmanager
def acquire_producer(app: Celery, queue: str, producer: Any = None) -> Iterator[Any]:
    """A producer of kombu's for the jobs of a queue.

    Args:
        app: The app.
        queue: Name of the queue.
        producer: One for the app's broker, or for the shard of the queue, that the caller has.
    """
    shard = shard_of(app, queue)
    if not shard.is_apart:
        with app.producer_or_acquire(producer) as found:
            yield found
        return
    if producer is not None and SHARD in producer.connection.transport_options:
        yield producer
        return
    pool: Any = pools.producers[shard.connect(app, writes=True)]
    # As Celery's own pool of producers.
    pool.limit = app.pool.limit
    with pool.acquire(block=True) as found:
        yield found


@contextmanager
def open_shards(app: Celery) -> Iterator[Sequence[Any]]:
    """Connections of kombu's to all shards, in order; each connects when it is first used."""
    with ExitStack() as stack:
        yield [stack.enter_context(shard.connect(app)) for shard in list_shards(app)]
