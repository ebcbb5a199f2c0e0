"""Clients of a Redis or a cluster, and where the keys of jobs and results are there.

They are redis-py's own: whoever bears witness of ours must not be ours.
"""

from typing import Any

from redis import Redis, RedisCluster
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException, RedisError

from batchery.broker_url import is_cluster, read_cluster_url
from batchery.transport.cluster import find_shard, list_tags

#: What a server that is down, full, or reading its data answers with.
AWAY = (RedisError, RedisClusterException, OSError)

#: Longest wait for one answer, in seconds.
ANSWER_S = 5.0


def connect(url: str) -> Any:
    """A client of a Redis or a cluster."""
    if not is_cluster(url):
        return Redis.from_url(url, socket_timeout=ANSWER_S)
    nodes, options = read_cluster_url(url)
    make_node: Any = ClusterNode
    return RedisCluster(
        startup_nodes=[make_node(*each) for each in nodes],
        require_full_coverage=False,
        socket_timeout=ANSWER_S,
        **options,
    )


def find_tag(url: str, name: str) -> str:
    """With what keys begin that belong to a queue, or to the id of a job."""
    return list_tags()[find_shard(name)] if is_cluster(url) else ""


def strip_tag(key: str) -> str:
    """A key without the tag of its shard."""
    tag, found, rest = key.partition("}")
    return rest if found and f"{tag}}}" in list_tags() else key
