"""A Redis Cluster whose primaries are killed and replaced, and whose slots move."""

from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from batchery.transport.cluster import list_tags
from benchmarks.redis_cluster import Node, RedisCluster

#: Of a node whose log is written anew: what is not yet in it would be gone.
REWRITES = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")


class FaultyCluster:
    """Three primaries with a replica each; one node at a time is down.

    Nodes are killed as processes. What one has written to its replica's connection still arrives.
    """

    def __init__(self, folder: Path) -> None:
        """Starts it.

        Args:
            folder: Where its data is kept; it is made.

        Raises:
            RedisUnavailable: There is no redis-server.
            TimeoutError: It does not start.
        """
        # The jobs of one node wait for its failover, and no others.
        self._cluster = RedisCluster(folder, cluster_require_full_coverage="no")
        self._cluster.__enter__()
        self._down: Node | None = None
        #: Whether the node that is down stays so until its replica has its place.
        self._is_replaced = False
        self._is_full = False

    @property
    def pid(self) -> int:
        """Process id of one of its nodes."""
        return next(node.pid for node in self._cluster.nodes if node.is_running)

    @property
    def worker_url(self) -> str:
        """URL for workers, the same for as long as this object lives."""
        return self._cluster.url

    @property
    def url(self) -> str:
        """URL for the harness itself."""
        return self._cluster.url

    def kill(self, pick: float) -> bool:
        """Kills a primary; returns whether all nodes ran, and replicas had all data.

        A primary without a replica that has its data would take that with it.
        """
        if not self._is_whole:
            return False
        primaries = [node for node in self._cluster.nodes if self._cluster.is_primary(node)]
        self._down = primaries[int(pick * len(primaries))]
        self._down.kill()
        return True

    def restart(self) -> bool:
        """Starts the node that was killed, unless its replica shall have its place first."""
        if self._down is None or self._is_replaced:
            return False
        self._down.start()
        self._down = None
        return True

    def fail_over(self, pick: float) -> bool:
        """Kills a primary, which stays down until its replica has its place."""
        if not self.kill(pick):
            return False
        self._is_replaced = True
        return True

    def follow(self) -> bool:
        """Starts the old primary, as a replica; returns whether there is a new one."""
        if not self._is_replaced:
            return True
        primaries = [node for node in self._cluster.nodes if self._cluster.is_primary(node)]
        if len(primaries) < len(self._cluster.nodes) // 2:
            return False
        self._is_replaced = False
        self.restart()
        return True

    def move(self, pick: float) -> bool:
        """Moves a shard to another primary; returns whether all nodes ran, and had room."""
        if self._is_full or not self._is_whole:
            return False
        tags = list_tags()
        slot = key_slot(tags[int(pick * len(tags))].encode())
        source = self._cluster.primary_of(slot)
        others = [node for node in self._cluster.nodes if self._cluster.is_primary(node)]
        others.remove(source)
        self._cluster.move(slot, others[int(pick * 1000) % len(others)])
        return True

    def fill(self) -> bool:
        """Puts all nodes at maxmemory: they refuse what needs more."""
        self._is_full = True
        return self._set("maxmemory", "1")

    def free(self) -> bool:
        """Ends that."""
        self._is_full = False
        return self._set("maxmemory", "0")

    def cut(self) -> int:
        """Cuts all connections of clients, the harness's included; returns how many there were."""
        kinds = ("normal", "pubsub")
        return sum(
            int(self._cluster.ask(node, "CLIENT KILL TYPE", kind))
            for node in self._running
            for kind in kinds
        )

    def heal(self) -> None:
        """Ends every fault."""
        self._is_replaced = False
        self.restart()
        self.free()

    def close(self) -> None:
        """Stops the nodes; their data stays."""
        self._cluster.__exit__()

    @property
    def _running(self) -> list[Node]:
        return [node for node in self._cluster.nodes if node.is_running]

    @property
    def _is_whole(self) -> bool:
        if self._down is not None or not self._cluster.is_ready():
            return False
        try:
            told = [_read(self._cluster.ask(node, "INFO persistence")) for node in self._running]
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        return not any(each[name] == "1" for each in told for name in REWRITES)

    def _set(self, name: str, value: str) -> bool:
        for node in self._running:
            self._cluster.ask(node, "CONFIG SET", name, value)
        return True


def _read(info: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in info.items()}
