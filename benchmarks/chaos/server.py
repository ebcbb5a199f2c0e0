"""A Redis that is killed, filled, replaced and started again, at addresses that stay the same."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis import Redis

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.chaos.proxy import Proxy

#: How long a replica may take for a step, in seconds.
STEP_S = 30.0


class FaultyRedis:
    """A redis-server that confirms nothing before it is on the disk, behind two proxies."""

    def __init__(self, folder: Path) -> None:
        """Starts it.

        Args:
            folder: Where its data is kept; created if missing.

        Raises:
            RedisUnavailable: It does not start.
        """
        self._server = EmbeddedRedis(folder)
        self._server.start()
        #: Takes its place; started with the first failover.
        self._spare = EmbeddedRedis(folder.with_name(f"{folder.name}-spare"))
        self._spare.password = self._server.password
        self._has_spare = False
        #: The workers' way, which is cut.
        self._workers = Proxy(self._server.port)
        #: The harness's own, which is not; it only ends when the server does.
        self._own = Proxy(self._server.port)
        self._set("appendfsync", "always")
        self._is_up = True

    @property
    def pid(self) -> int:
        """Process id of the server, or of the last one while none runs."""
        return self._server.pid

    @property
    def worker_url(self) -> str:
        """URL for workers, the same for as long as this object lives."""
        return self._url(self._workers)

    @property
    def url(self) -> str:
        """URL for the harness itself."""
        return self._url(self._own)

    def kill(self, _: float = 0.0) -> bool:
        """Kills the server; its data is as the disk has it."""
        if self._is_up:
            self._is_up = False
            os.kill(self._server.pid, signal.SIGKILL)
            self._server.stop()
        return True

    def restart(self) -> bool:
        """Starts it on the same data, if it does not run; returns whether it did not.

        Raises:
            RedisUnavailable: It does not start.
        """
        if self._is_up:
            return False
        self._server.start()
        self._set("appendfsync", "always")
        self._workers.target = self._own.target = self._server.port
        self._is_up = True
        return True

    def fill(self) -> bool:
        """Puts the server at maxmemory: it refuses what needs more. Returns whether it runs."""
        return self._is_up and self._set("maxmemory", "1")

    def free(self) -> bool:
        """Ends that; so does a restart."""
        return self._is_up and self._set("maxmemory", "0")

    def fail_over(self, _: float = 0.0) -> bool:
        """Makes a replica the primary; returns whether the primary runs.

        The old one is a replica then, takes no writes, and cuts its connections. Workers and
        harness are still led there, until `follow`. FAILOVER pauses writes until the replica has
        them all: what asynchronous replication loses otherwise is no fault of those who wrote.
        """
        if not self._is_up:
            return False
        old, new = self._server, self._spare
        if not self._has_spare:
            new.start()
            self._has_spare = True
        with _client(old) as first, _client(new) as second:
            for each in (first, second):
                each.config_set("masterauth", old.password)
                each.config_set("repl-diskless-sync-delay", 0)
                each.config_set("appendfsync", "always")
                each.config_set("maxmemory", 0)
            second.replicaof("127.0.0.1", old.port)
            # Its file is written anew after that, and it must not be killed before.
            _wait(lambda: second.info("replication")["master_link_status"] == "up")
            _wait(lambda: not second.info("persistence")["aof_rewrite_in_progress"])
            # The primary hears later than the replica that their link is up.
            _wait(lambda: _is_online(first, new.port))
            first.execute_command("FAILOVER", "TO", "127.0.0.1", new.port)
            _wait(lambda: second.info("replication")["role"] == "master")
            _wait(lambda: first.info("replication")["role"] == "slave")
            for kind in ("normal", "pubsub"):
                first.client_kill_filter(_type=kind, skipme=True)
        self._server, self._spare = new, old
        return True

    def follow(self) -> bool:
        """Leads everybody to the new primary, as Sentinel or a name server does.

        Whoever is there already keeps his connections: stock Celery loses a message that is on its
        way through one that is cut.
        """
        if self._is_up and self._workers.target != self._server.port:
            self._workers.target = self._own.target = self._server.port
            self._workers.cut()
            self._own.cut()
        return True

    def move(self, _: float = 0.0) -> bool:
        """Does nothing: there is no other node."""
        return True

    def heal(self) -> None:
        """Ends every fault: it is up, everybody is led to it, and it has room."""
        self.restart()
        self.follow()
        self.free()

    def cut(self) -> int:
        """Cuts all connections of workers; returns how many there were."""
        return self._workers.cut()

    def close(self) -> None:
        """Stops the server; its data stays."""
        self._workers.close()
        self._own.close()
        self._server.stop()
        self._spare.stop()

    def _url(self, proxy: Proxy) -> str:
        return f"redis://:{self._server.password}@127.0.0.1:{proxy.port}/0"

    def _set(self, name: str, value: str) -> bool:
        with _client(self._server) as redis:
            return bool(redis.config_set(name, value))


def _is_online(primary: Any, port: int) -> bool:
    """Whether a primary counts the replica at that port as one that it may fail over to."""
    replicas = [each for each in primary.info("replication").values() if isinstance(each, dict)]
    return any(each["port"] == port and each["state"] == "online" for each in replicas)


@contextlib.contextmanager
def _client(server: EmbeddedRedis) -> Iterator[Any]:
    with contextlib.closing(Redis.from_url(server.url)) as redis:
        yield redis


def _wait(condition: Callable[[], bool]) -> None:
    """Waits for a step of a failover.

    Raises:
        TimeoutError: It does not happen.
    """
    end_s = time.monotonic() + STEP_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"a replica took longer than {STEP_S:g} s; see its log")
        time.sleep(0.01)
