"""Leases: who runs a batch, agreed in Redis, as a store at a URL has no locks.

A lease is a key with a token that expires. Its holder renews it, and lets go of it by its own clock
before it can have expired: so whatever a holder does, nobody else does it.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from kombu.transport import redis as kombu_redis

from batchery.errors import BatcheryError, SettingsError
from batchery.redis_scripts import RedisScripts

logger = logging.getLogger(__name__)

#: How long a lease holds without being renewed, in seconds: a batch whose process was killed is
#: taken up after that.
LEASE_S = 10.0

#: How often leases are renewed, in seconds.
RENEW_S = 2.0

#: For how long before its end a lease is not relied on, in seconds: a write that was begun by then
#: has ended.
MARGIN_S = 3.0

LUA = Path(__file__).parent / "lua"


class LeaseLost(BatcheryError):
    """Another process may run the batch now."""


class Lease:
    """The right to run one batch."""

    def __init__(self, leases: "Leases", key: str, token: str, until_s: float) -> None:
        self.key = key
        self.token = token
        self._leases = leases
        self._until_s = until_s

    @property
    def is_held(self) -> bool:
        """Whether nobody else can have it."""
        return self._leases.clock() < self._until_s - MARGIN_S

    def check(self) -> None:
        """Makes sure that it is held.

        Raises:
            LeaseLost: It is not.
        """
        if not self.is_held:
            raise LeaseLost(f"lease {self.key}: lost")

    def extend(self, until_s: float) -> None:
        """Notes that it was renewed; one that was lost stays so."""
        if self.is_held:
            self._until_s = until_s

    def lose(self) -> None:
        """Notes that another process has it."""
        self._until_s = float("-inf")

    def release(self) -> None:
        """Lets another process have it at once."""
        self._leases.release(self)


class Leases:
    """The leases of this process, which a thread renews."""

    def __init__(
        self,
        client: Any,
        prefix: str = "",
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares; renewals begin with the block.

        Args:
            client: A `redis.Redis`.
            prefix: Kombu's `global_keyprefix`.
            lease_s: How long a lease holds, in seconds.
            clock: Tells the time in seconds, from any start.
        """
        self.clock = clock
        self._client = client
        self._scripts = RedisScripts(client, LUA)
        self._prefix = prefix
        self._lease_s = lease_s
        self._held: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_all, name="batch-leases", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def take(self, name: str) -> Lease | None:
        """A lease that nobody has; None if somebody does.

        Raises:
            redis.RedisError: Redis is away.
        """
        key, token = f"{self._prefix}batchery:batch:{name}", secrets.token_hex(16)
        until_s = self.clock() + self._lease_s
        if not self._client.set(key, token, nx=True, px=self._lease_ms):
            return None
        lease = Lease(self, key, token, until_s)
        with self._lock:
            self._held[key] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Gives a lease back; without Redis, it expires."""
        with self._lock:
            self._held.pop(lease.key, None)
        lease.lose()
        try:
            self._scripts.run("release", [lease.key], lease.token)
        except (redis.RedisError, OSError) as error:
            logger.warning("%s: not released, so it expires: %s", lease.key, error)

    def renew(self) -> None:
        """Renews all leases, once."""
        with self._lock:
            held = list(self._held.values())
        for lease in held:
            if not lease.is_held:
                continue
            until_s = self.clock() + self._lease_s
            try:
                renewed = self._scripts.run("renew", [lease.key], lease.token, self._lease_ms)
            except (redis.RedisError, OSError) as error:
                # It is lost by its own clock if this goes on.
                logger.warning("%s: not renewed: %s", lease.key, error)
                continue
            if renewed:
                lease.extend(until_s)
            else:
                lease.lose()

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    def _renew_all(self) -> None:
        while not self._ended.wait(RENEW_S):
            self.renew()


def leases_of(app: Celery) -> Leases:
    """Leases in the Redis of an app: the broker, or the result backend.

    Raises:
        SettingsError: Neither is a Redis.
    """
    channel: Any = app.connection_for_write().default_channel
    if isinstance(channel, kombu_redis.Channel):
        # Kombu's own client would add the prefix to some keys and not to others.
        return Leases(redis.Redis(connection_pool=channel.pool), channel.global_keyprefix)
    backend: Any = app.backend
    if isinstance(backend, RedisBackend):
        return Leases(backend.client)
    raise SettingsError(
        f"app {app.main!r}: batches of the gateway need a Redis, as broker or result backend"
    )
