"""Redis Cluster: its shards, and connections that follow a shard from node to node.

A shard is a sixteenth of all slots. Its keys begin with a hash tag, so they lie in one slot of it:
a script may touch all of them, and the shard is used as one server with a key prefix is. Queues
are dealt to the shards by their names, results by the ids of their jobs.
"""

import os
from collections.abc import Mapping
from functools import cache, cached_property
from itertools import count
from typing import Any
from zlib import crc32

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    RedisClusterException,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.retry import Retry

from batchery.broker_url import read_cluster_url
from batchery.errors import RedisUnavailable

#: Number of shards of a cluster. With more of them than there are nodes, nodes have about the same.
SHARDS = 16

#: What a node says that cannot serve a slot, or not now.
ELSEWHERE = (
    *(AskError, ClusterDownError, MasterDownError, TryAgainError),
    redis.ReadOnlyError,
)


@cache
def list_tags() -> tuple[str, ...]:
    """The hash tags of the shards: each lies in its sixteenth of the slots."""
    width, found = REDIS_CLUSTER_HASH_SLOTS // SHARDS, dict[int, str]()
    for number in count():
        tag = f"{{b{number}}}"
        found.setdefault(key_slot(tag.encode()) // width, tag)
        if len(found) == SHARDS:
            return tuple(found[shard] for shard in range(SHARDS))
    raise AssertionError


def find_shard(name: str | bytes) -> int:
    """The number of the shard to which a name belongs: that of a queue, or the id of a job."""
    return crc32(name.encode(errors="replace") if isinstance(name, str) else name) % SHARDS


class SlotMoved(redis.ConnectionError):
    """Another node has the slot, or will soon: the command was not obeyed."""


class Cluster:
    """A cluster, as one process knows it: which node has which slot. For any number of threads."""

    def __init__(self, url: str) -> None:
        """Does not connect yet; raises ValueError as `read_cluster_url` does."""
        self.nodes, self.options = read_cluster_url(url)
        self._is_stale = False

    @cached_property
    def _manager(self) -> Any:
        make_node: Any = ClusterNode
        nodes = [make_node(host, port) for host, port in self.nodes]
        # A dead node must not hold up the question who has its slots.
        limits = {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}
        return redis.RedisCluster(
            startup_nodes=nodes, require_full_coverage=False, **{**self.options, **limits}
        ).nodes_manager

    def find_node(self, slot: int) -> tuple[str, int]:
        """Host and port of the primary that has a slot.

        Raises:
            redis.ConnectionError: No node answers, or none has the slot.
            RedisUnavailable: It is no cluster.
        """
        try:
            manager = self._manager
            if self._is_stale:
                self._is_stale = False
                manager.initialize()
            node = manager.get_node_from_slot(slot)
        except (RedisClusterException, SlotNotCoveredError) as error:
            self._is_stale = True
            # redis-py has no other word for it.
            if "Cluster mode is not enabled" in str(error):
                raise RedisUnavailable(
                    f"the Redis at {self} is no cluster; write its URL as redis://HOST:PORT/0"
                ) from error
            raise redis.ConnectionError(f"the cluster at {self}: {error}") from error
        return node.host, node.port

    def note(self, error: Exception) -> None:
        """Notes that a node could not be reached, or does not serve a slot."""
        if isinstance(error, MovedError):
            self._manager.move_slot(error)
        else:
            self._is_stale = True

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.nodes)


class _SlotConnection:
    """A connection to whichever node has a slot; mixed into redis-py's classes of connections."""

    host: str
    port: int

    def __init__(self, *, cluster: Cluster, slot: int, **options: Any) -> None:
        super().__init__(**options)
        self._cluster = cluster
        self._slot = slot

    def _connect(self) -> Any:
        self.host, self.port = self._cluster.find_node(self._slot)
        try:
            return super()._connect()  # type: ignore[misc]
        except OSError as error:
            self._cluster.note(error)
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Reads an answer; one that says that another node has the slot is a lost connection."""
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ELSEWHERE as error:
            self._cluster.note(error)
            self.disconnect()  # type: ignore[attr-defined]
            # Whoever looks for a cause would take it for a refusal.
            raise SlotMoved(f"another node has the slot now: {error}") from None


class SlotConnection(_SlotConnection, redis.Connection):
    """The same, in plain text."""


class SecureSlotConnection(_SlotConnection, redis.SSLConnection):
    """The same, encrypted."""


@cache
def _get_cluster(url: str, _: int) -> Cluster:
    return Cluster(url)


def get_cluster(url: str) -> Cluster:
    """The cluster of a URL; a forked process gets its own, as connections cannot be shared."""
    return _get_cluster(url, os.getpid())


def slot_options(url: str, shard: int) -> dict[str, Any]:
    """Options of a redis-py connection pool whose connections follow a shard."""
    cluster = get_cluster(url)
    options = dict(cluster.options)
    is_secure = issubclass(options.pop("connection_class", redis.Connection), redis.SSLConnection)
    return {
        **options,
        "connection_class": SecureSlotConnection if is_secure else SlotConnection,
        # Anything else may have been obeyed.
        "retry": Retry(NoBackoff(), 2, (SlotMoved,)),
        "cluster": cluster,
        "slot": key_slot(list_tags()[shard].encode()),
    }


def make_shard_client(url: str, shard: int, **options: Any) -> "redis.Redis":
    """A client of one shard, whose keys must begin with its tag; does not connect yet.

    Args:
        url: Of the cluster.
        shard: Its number.
        options: Further options of the connections, such as timeouts.
    """
    given: Mapping[str, Any] = {**slot_options(url, shard), **options}
    return redis.Redis(connection_pool=redis.ConnectionPool(**given))
