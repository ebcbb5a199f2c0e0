"""A Redis that is killed, filled and started again, at addresses that stay the same."""

import contextlib
import os
import signal
from pathlib import Path

from redis import Redis

from batchery_worker.local.redis_server import EmbeddedRedis
from benchmarks.chaos.proxy import Proxy


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
        #: The workers' way, which is cut.
        self._workers = Proxy(self._server.port)
        #: The harness's own, which is not; it only ends when the server does.
        self._own = Proxy(self._server.port)
        self._set("appendfsync", "always")
        self._is_up = True

    @property
    def worker_url(self) -> str:
        """URL for workers, the same for as long as this object lives."""
        return self._url(self._workers)

    @property
    def url(self) -> str:
        """URL for the harness itself."""
        return self._url(self._own)

    def kill(self) -> None:
        """Kills the server; its data is as the disk has it."""
        if self._is_up:
            self._is_up = False
            os.kill(self._server.pid, signal.SIGKILL)
            self._server.stop()

    def restart(self) -> None:
        """Starts it on the same data, if it does not run.

        Raises:
            RedisUnavailable: It does not start.
        """
        if not self._is_up:
            self._server.start()
            self._set("appendfsync", "always")
            self._workers.target = self._own.target = self._server.port
            self._is_up = True

    def fill(self) -> bool:
        """Puts the server at maxmemory: it refuses what needs more. Returns whether it runs."""
        return self._is_up and self._set("maxmemory", "1")

    def free(self) -> bool:
        """Ends that; so does a restart."""
        return self._is_up and self._set("maxmemory", "0")

    def cut(self) -> int:
        """Cuts all connections of workers; returns how many there were."""
        return self._workers.cut()

    def close(self) -> None:
        """Stops the server; its data stays."""
        self._workers.close()
        self._own.close()
        self._server.stop()

    def _url(self, proxy: Proxy) -> str:
        return f"redis://:{self._server.password}@127.0.0.1:{proxy.port}/0"

    def _set(self, name: str, value: str) -> bool:
        with contextlib.closing(Redis.from_url(self._server.url)) as redis:
            return bool(redis.config_set(name, value))
