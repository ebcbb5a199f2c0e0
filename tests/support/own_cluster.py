"""A Redis Cluster of real servers, whose nodes a test may kill, and whose slots it may move."""

from benchmarks.redis_cluster import RedisCluster
from support.own_redis import OwnRedis


class OwnCluster(RedisCluster):
    """Three primaries with a replica each, if nobody asks for others, of the server that tests use."""

    node_class = OwnRedis
