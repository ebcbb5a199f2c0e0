"""A Redis Cluster of real servers, whose nodes may be killed, and whose slots may be moved."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol, Self, TypeVar

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from batchery.cluster_client import send_all
from batchery.errors import RedisUnavailable
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import find_redis_server

T = TypeVar("T")

#: How long a node may be silent before its replica takes its place, in milliseconds.
NODE_TIMEOUT_MS = 1500

#: How long anything may take that nodes do together, in seconds.
STEP_S = 90.0

#: How long nodes have to know each other before they meet once more, in seconds.
MEET_S = 5.0

#: Pause between two looks at them, in seconds.
LOOK_S = 0.02


class Node(Protocol):
    """One server; it runs while it is entered as a context, but for `kill` until `start`."""

    #: The server; and where it listens, the same for as long as this object lives.
    binary: Path
    port: int
    url: str

    def __init__(self, directory: Path, binary: Path | None = None, **options: str) -> None:
        """Options are those of redis.conf, with underscores."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None:
        """Starts it on its data, and waits until it answers."""

    def kill(self) -> None:
        """Ends it by kill -9."""

    @property
    def is_running(self) -> bool:
        """Whether it was not killed."""

    @property
    def pid(self) -> int:
        """Of the process that runs."""


class GuardedNode:
    """A server that cannot outlive this process."""

    def __init__(self, directory: Path, binary: Path | None = None, **options: str) -> None:
        """Options are those of redis.conf, with underscores."""
        directory.mkdir()
        self.binary = binary or find_redis_server()
        self.port = find_lasting_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        given = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "yes"}
        self._options = {**given, **options}
        self._directory = directory
        self._process: GuardedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it on its data, and waits until it answers.

        Raises:
            TimeoutError: It does not.
        """
        command = [str(self.binary)]
        for name, value in self._options.items():
            command += [f"--{name.replace('_', '-')}", value]
        self._process = GuardedProcess(command, cwd=self._directory)
        wait_for(self._answers, f"the Redis at port {self.port} answers")

    def kill(self) -> None:
        """Ends it by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @property
    def is_running(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def _answers(self) -> bool:
        with closing(redis.Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                # It has not started yet, or is still reading its data.
                return False


class RedisCluster:
    """Primaries with an equal share of the slots each; runs while it is entered as a context."""

    #: What its nodes are.
    node_class: type[Node] = GuardedNode

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
            binary: The server, Redis 7 or newer; None for the first one in PATH.
            options: Those of redis.conf, with underscores.

        Raises:
            RedisUnavailable: There is no such server.
        """
        binary = binary or find_cluster_server()
        if binary is None:
            raise RedisUnavailable("no redis-server of version 7 or newer in PATH")
        directory.mkdir()
        own = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": str(NODE_TIMEOUT_MS),
            "cluster_replica_validity_factor": "0",
            "repl_diskless_sync_delay": "0",
            # What a process has written is there after its end. Only a machine's end would lose it.
            "appendfsync": "no",
        }
        self._primaries = primaries
        self._directory, self._binary = directory, binary
        self._options = {**own, **options}
        # By themselves they are 10,000 above those of clients, and may be taken.
        self._bus_ports = [find_lasting_port() for _ in range(primaries * (1 + replicas))]
        #: Primaries first, as they are at the start.
        self.nodes = [self._make_node(number) for number in range(len(self._bus_ports))]
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

    def _make_node(self, number: int) -> Node:
        options = {"cluster_port": str(self._bus_ports[number]), **self._options}
        return self.node_class(self._directory / str(number), self._binary, **options)

    def grow(self) -> Node:
        """Adds a primary that has no slots yet."""
        self._bus_ports.append(find_lasting_port())
        made = self._stack.enter_context(self._make_node(len(self.nodes)))
        self.nodes.append(made)
        self._meet(made)
        wait_for(self._all_know_all, "all nodes know the new one")
        self.wait_ready()
        return made

    def _meet(self, node: Node) -> None:
        address = ("127.0.0.1", self.nodes[0].port, self._bus_ports[0])
        self.ask(node, "CLUSTER MEET", *address)

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
        wait_for(self._meet_all, "all nodes know each other")
        for number, node in enumerate(replicas):
            self.ask(node, "CLUSTER REPLICATE", self.id_of(primaries[number % self._primaries]))
        self.wait_ready()

    def _meet_all(self) -> bool:
        """Has all nodes meet; a node forgets one that took too long to answer on a busy machine."""
        for node in self.nodes[1:]:
            self._meet(node)
        with suppress(TimeoutError):
            return wait_for(self._all_know_all, "all nodes know each other", MEET_S)
        return False

    def _all_know_all(self) -> bool:
        known = [self.info(node)["cluster_known_nodes"] for node in self.nodes]
        return known == [str(len(self.nodes))] * len(self.nodes)

    def ask(self, node: Node, command: str, *args: Any) -> Any:
        """What a node answers."""
        client: Any = redis.Redis.from_url(node.url, decode_responses=True)
        with closing(client):
            return client.execute_command(*command.split(), *args)

    def id_of(self, node: Node) -> str:
        """The name by which the other nodes know one."""
        return str(self.ask(node, "CLUSTER MYID"))

    def info(self, node: Node) -> dict[str, str]:
        """What a node says of the cluster."""
        lines = str(self.ask(node, "CLUSTER INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines)

    def is_primary(self, node: Node) -> bool:
        """Whether a node answers, and is a primary with slots."""
        with suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(self.ask(node, "ROLE")[0] == "master" and self.slots_of(node))
        return False

    def slots_of(self, node: Node) -> list[tuple[int, int]]:
        """The first and last slots of the ranges that a node says are its own."""
        own = self.id_of(node)
        return [
            (first, last)
            for first, last, primary, *_ in self.ask(node, "CLUSTER SLOTS")
            if primary[2] == own
        ]

    def primary_of(self, slot: int) -> Node:
        """The node that has a slot.

        Raises:
            TimeoutError: None has it, for long.
        """

        def find() -> Node | None:
            return next((node for node in self.nodes if self._has(node, slot)), None)

        return wait_for(find, f"a node has slot {slot}")

    def _has(self, node: Node, slot: int) -> bool:
        if not self.is_primary(node):
            return False
        return any(first <= slot <= last for first, last in self.slots_of(node))

    def wait_ready(self) -> None:
        """Waits until all slots are served, and each replica that runs has all data.

        Raises:
            TimeoutError: That does not happen.
        """
        wait_for(self.is_ready, "the cluster is ready")

    def is_ready(self) -> bool:
        """Whether all slots are served, and each replica that runs has all data."""
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

    def move(self, slot: int, to: Node) -> None:
        """Moves a slot to another primary, key by key, as `redis-cli --cluster reshard` does."""
        source = self.primary_of(slot)
        if source is to:
            return
        self._set_slot(to, slot, "IMPORTING", source)
        self._set_slot(source, slot, "MIGRATING", to)
        # redis-py would make texts of keys, which need not be any.
        listing, target = ("CLUSTER", "GETKEYSINSLOT", slot, 100), ("127.0.0.1", to.port, "", 0)
        with closing(redis.Redis.from_url(source.url)) as client:
            while keys := send_all(client, [listing])[0]:
                send_all(client, [("MIGRATE", *target, 10_000, "KEYS", *keys)])
        for node in (to, source, *self.nodes):
            # A new one has no slots yet.
            if node is to or self.is_primary(node):
                self._set_slot(node, slot, "NODE", to)

    def _set_slot(self, node: Node, slot: int, what: str, other: Node) -> None:
        """Tells a node of a slot, which may not have heard yet that another one is a primary."""

        def is_told() -> bool:
            with suppress(redis.ResponseError):
                return bool(self.ask(node, "CLUSTER SETSLOT", slot, what, self.id_of(other)))
            return False

        wait_for(is_told, f"slot {slot} is {what}")


def find_cluster_server() -> Path | None:
    """A redis-server or valkey-server in PATH of version 7 or newer; None where there is none."""
    for folder in os.get_exec_path():
        for name in ("redis-server", "valkey-server"):
            if (found := shutil.which(name, path=folder)) and is_new(Path(found)):
                return Path(found).absolute()
    return None


def is_new(server: Path) -> bool:
    """Whether a server has all commands that a cluster is made by here."""
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    return int(done.stdout.partition(" v=")[2].partition(".")[0]) >= 7


def find_lasting_port() -> int:
    """A free port for a server that ends and comes back to it.

    Linux gives no port below 32,768 to whoever asks for any. So nobody takes it meanwhile.
    """
    random = SystemRandom()
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(condition: Callable[[], T | None], what: str, timeout_s: float = STEP_S) -> T:
    """Waits until a condition is true; returns its value.

    Raises:
        TimeoutError: It was not true in time.
    """
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(LOOK_S)
    return value
