"""A Redis server that a commit writes to: what is sent to it waits as long as it is away."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery import Celery

from batchery.redis_scripts import RedisScripts
from batchery.retry import is_away, pause_s
from batchery.transport.channel import SOCKET_TIMEOUT_S

T = TypeVar("T")

logger = logging.getLogger("batchery.device")

#: The scripts that write results. The head of each file names its keys, and who writes them.
LUA = Path(__file__).parent / "lua"

#: How often a command is sent to a Redis that can write, before the jobs are left to the tracer. A
#: lost connection explains the first failure, a failover the second.
MAX_TRIES = 3

#: Maximum pause between two attempts to reach a Redis that is away, in seconds.
MAX_PAUSE_S = 2.0


def result_scripts(client: "redis.Redis") -> RedisScripts:
    """The scripts that write results; most of them need a client of the backend's database."""
    return RedisScripts(client, LUA)


def get_database(client: Any) -> int:
    """The number of a client's database."""
    return int(client.connection_pool.connection_kwargs.get("db") or 0)


def broker_client(app: Celery) -> Any:
    """Makes a client of the broker that an app consumes from.

    Raises:
        redis.RedisError: No broker answers.
    """
    with app.connection_for_read() as connection:
        once_each = len(connection.alt or ())
        connection.ensure_connection(
            max_retries=once_each, interval_start=0, reraise_as_library_errors=False
        )
        channel: Any = connection.channel()
        try:
            return channel._make_separate_client(SOCKET_TIMEOUT_S)
        finally:
            channel.close()


class RetryingRedis:
    """Sends commands to one server, each until it is answered."""

    def __init__(
        self,
        connect: Callable[[], Any],
        on_wait: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not connect yet.

        Args:
            connect: Makes the client, or returns the one that there is.
            on_wait: Called when results must wait because the server is away.
            sleep: Waits for a number of seconds.
        """
        self._connect = connect
        self._on_wait = on_wait
        self._sleep = sleep
        self._client: Any = None
        self._scripts: RedisScripts | None = None

    @property
    def client(self) -> Any:
        """The client; made anew after each loss of the server."""
        if self._client is None:
            self._client = self._connect()
        return self._client

    @property
    def scripts(self) -> RedisScripts:
        """The scripts that write results, on this client."""
        if self._scripts is None:
            self._scripts = result_scripts(self.client)
        return self._scripts

    def attempt(self, command: Callable[["RetryingRedis"], T], lease_key: str) -> tuple[T, int]:
        """Sends a command; waits as long as the server is away.

        Args:
            command: Sends it; it may do so again although the server has obeyed already.
            lease_key: HASH of the worker's leases, for a write that changes nothing.

        Returns:
            The answer, and the number of failed attempts before it.

        Raises:
            redis.RedisError, OSError: The server can write, and still refuses.
        """
        tries = 0
        while True:
            try:
                return command(self), tries
            except (redis.RedisError, OSError) as error:
                self._await(lease_key, error)
                tries += 1
                if tries == MAX_TRIES:
                    raise

    def disconnect(self) -> None:
        """Closes the connections; the next command connects anew, maybe to another server."""
        client, self._client, self._scripts = self._client, None, None
        if client is not None:
            client.connection_pool.disconnect()

    def _await(self, lease_key: str, error: Exception) -> None:
        """Waits until the server can write; returns at once if it can."""
        failures = 0
        while True:
            try:
                # It must be a write, because Redis may refuse only writes. There is no such field.
                self.client.hdel(lease_key, "")
            except (redis.RedisError, OSError) as still:
                if not is_away(still):
                    return
                error = still
            else:
                return
            failures += 1
            if failures == 1:
                logger.warning("results wait for Redis: %s", error)
                self._on_wait()
            # After a failover the address may belong to another server.
            self.disconnect()
            self._sleep(pause_s(failures, MAX_PAUSE_S))
