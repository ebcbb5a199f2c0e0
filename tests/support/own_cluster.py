"""A Redis Cluster of real servers, whose nodes a test may kill, and whose slots it may move."""

from benchmarks.redis_cluster import RedisCluster
from support.own_redis import OwnRedis


class OwnCluster(RedisCluster):
    """Three primaries with a replica each, unless a test asks for others."""

    node_class = OwnRedis
