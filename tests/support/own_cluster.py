"""A Redis Cluster of real servers, whose nodes a test may kill, and whose slots it may move."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from batchery.cluster_client import send_all
from support.harness import open_redis, wait_for
from support.own_redis import OwnRedis, find_lasting_port

#: How long a node may be silent before its replica takes its place, in milliseconds.
NODE_TIMEOUT_MS = 1500

#: How long nodes have to know each other before they meet once more, in seconds.
MEET_S = 5.0


class OwnCluster:
    """Primaries with an equal share of the slots each; runs while it is entered as a context."""

    def __init__(
        self,
        directory: Path,
        primaries: int = 3,
        replicas: int = 1,
        *,
        binary: Path | None = None,
        **options: str,
    ) -> None:
        """Starts nothing yet.

        Args:
            directory: Where its servers keep their files; it is made.
            primaries: Their number.
            replicas: How many of each.
            binary: The server; None for the one that is found first.
            options: Those of redis.conf, with underscores.
        """
        directory.mkdir()
        own: dict[str, Any] = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(NODE_TIMEOUT_MS),
            "cluster_replica_validity_factor": "0",
            "repl_diskless_sync_delay": "0",
            "appendfsync": "no",
        }
        self._primaries = primaries
        # By themselves they are 10,000 above those of clients, and may be taken.
        self._bus_ports = [find_lasting_port() for _ in range(primaries * (1 + replicas))]
        #: Primaries first, as they are at the start.
        self.nodes = [
            OwnRedis(
                directory / str(number), binary, **{**own, "cluster_port": str(port), **options}
            )
            for number, port in enumerate(self._bus_ports)
        ]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The URL for clients of ours."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        primaries, replicas = self.nodes[: self._primaries], self.nodes[self._primaries :]
        cuts = [
            number * REDIS_CLUSTER_HASH_SLOTS // self._primaries
            for number in range(self._primaries + 1)
        ]
        for number, node in enumerate(primaries):
            self.ask(node, "CLUSTER ADDSLOTSRANGE", cuts[number], cuts[number + 1] - 1)
            # So that no two have the same epoch, which would have to be settled first.
            self.ask(node, "CLUSTER SET-CONFIG-EPOCH", number + 1)
        wait_for(self._meet, "all nodes know each other")
        for number, node in enumerate(replicas):
            self.ask(node, "CLUSTER REPLICATE", self.id_of(primaries[number % self._primaries]))
        self.wait_ready()

    def _meet(self) -> bool:
        """Has all nodes meet; a node forgets one that took too long to answer on a busy machine."""
        for node in self.nodes[1:]:
            address = ("127.0.0.1", self.nodes[0].port, self._bus_ports[0])
            self.ask(node, "CLUSTER MEET", *address)
        with suppress(AssertionError):
            return wait_for(self._all_know_all, "all nodes know each other", MEET_S)
        return False

    def _all_know_all(self) -> bool:
        known = [self.info(node)["cluster_known_nodes"] for node in self.nodes]
        return known == [str(len(self.nodes))] * len(self.nodes)

    def ask(self, node: OwnRedis, command: str, *args: Any) -> Any:
        """What a node answers."""
        with open_redis(node.url, decode_responses=True) as client:
            return client.execute_command(*command.split(), *args)

    def id_of(self, node: OwnRedis) -> str:
        """The name by which the other nodes know one."""
        return str(self.ask(node, "CLUSTER MYID"))

    def info(self, node: OwnRedis) -> dict[str, str]:
        """What a node says of the cluster."""
        lines = str(self.ask(node, "CLUSTER INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines)

    def is_primary(self, node: OwnRedis) -> bool:
        """Whether a node answers, and is a primary with slots."""
        with suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(self.ask(node, "ROLE")[0] == "master" and self.slots_of(node))
        return False

    def slots_of(self, node: OwnRedis) -> list[tuple[int, int]]:
        """The first and last slots of the ranges that a node says are its own."""
        own = self.id_of(node)
        return [
            (first, last)
            for first, last, primary, *_ in self.ask(node, "CLUSTER SLOTS")
            if primary[2] == own
        ]

    def primary_of(self, slot: int) -> OwnRedis:
        """The node that has a slot."""

        def find() -> OwnRedis | None:
            return next((node for node in self.nodes if self._has(node, slot)), None)

        found = wait_for(find, f"a node has slot {slot}")
        assert found is not None
        return found

    def _has(self, node: OwnRedis, slot: int) -> bool:
        if not self.is_primary(node):
            return False
        return any(first <= slot <= last for first, last in self.slots_of(node))

    def wait_ready(self) -> None:
        """Waits until all slots are served, and each replica that runs has all data."""
        wait_for(self._is_ready, "the cluster is ready")

    def _is_ready(self) -> bool:
        for node in self.nodes:
            if not node.is_running:
                continue
            try:
                if self.info(node)["cluster_state"] != "ok":
                    return False
                role = self.ask(node, "ROLE")
            except (redis.ConnectionError, redis.TimeoutError):
                return False
            if role[0] == "slave" and role[3] != "connected":
                return False
        return True

    def move(self, slot: int, to: OwnRedis) -> None:
        """Moves a slot to another primary, key by key, as `redis-cli --cluster reshard` does."""
        source = self.primary_of(slot)
        if source is to:
            return
        self.ask(to, "CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.ask(source, "CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(to))
        # redis-py would make texts of keys, which need not be any.
        listing, target = ("CLUSTER", "GETKEYSINSLOT", slot, 100), ("127.0.0.1", to.port, "", 0)
        with open_redis(source.url) as client:
            while keys := send_all(client, [listing])[0]:
                send_all(client, [("MIGRATE", *target, 10_000, "KEYS", *keys)])
        for node in (to, source, *self.nodes):
            if self.is_primary(node):
                self.ask(node, "CLUSTER SETSLOT", slot, "NODE", self.id_of(to))
