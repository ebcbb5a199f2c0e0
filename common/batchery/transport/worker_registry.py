"""Registers a worker in Redis, so that others know it, and checks that this Redis is fit for it."""

import json
import logging
import os
import platform
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import redis

from batchery.errors import RedisUnavailable
from batchery.redis_scripts import RedisScripts
from batchery.transport.redis_schema import SCHEMA, Keys

logger = logging.getLogger("batchery.transport")

#: The oldest Redis that knows RPOP with a count, and tracking over RESP3.
OLDEST_REDIS = (6, 2)


class Registration:
    """Registers this worker, and unregisters it; with a new worker id each time."""

    def __init__(self, client: Any, keys: Keys, scripts: RedisScripts, expiry_s: float) -> None:
        """Asks Redis nothing yet; this worker counts as dead after `expiry_s` without heartbeat."""
        self._client = client
        self._keys = keys
        self._scripts = scripts
        self._expiry_s = expiry_s
        self._pid = os.getpid()
        self._version = version("batchery")
        self.worker = ""

    @property
    def is_mine(self) -> bool:
        """False in a forked child, whose parent goes on holding the leases."""
        return self._pid == os.getpid()

    def check_server(self) -> None:
        """Checks that the server can hold leases.

        Raises:
            RedisUnavailable: It cannot; the text says why.
        """
        is_shard = "slot" in self._client.connection_pool.connection_kwargs
        require_supported(server_info(self._client, "server"), is_shard=is_shard)
        warn_of_eviction(server_info(self._client, "memory"))

    def register(self, last_token: int) -> None:
        """Makes this worker known, under a new id.

        Args:
            last_token: No lower token must be given out again.

        Raises:
            RedisUnavailable: What is in this Redis was written by a newer version, or workers of
                an older one live.
        """
        self.worker = uuid.uuid4().hex
        keys = self._keys
        found = self._scripts.run(
            "register",
            [keys.workers, keys.worker_info, keys.token, keys.schema],
            *[self.worker, self.info(), last_token, SCHEMA],
        )
        if found > SCHEMA:
            raise RedisUnavailable(
                f"the queues in this Redis are of a newer Batchery: their layout is {found},"
                f" and this worker knows {SCHEMA}; update the worker"
            )
        if found:
            raise RedisUnavailable(
                f"workers of an older Batchery live on this Redis: their layout is {found}, and"
                f" this worker knows {SCHEMA}; stop all of them, which gives what they hold back to"
                " its queues, then start this one"
            )

    def info(self, **known: Any) -> str:
        """What others want to know of this worker, as JSON; from any thread.

        Args:
            known: What is known of it by now, see `RegisteredWorker`.
        """
        about = {"host": platform.node(), "pid": self._pid}
        about |= {"expiry_s": self._expiry_s, "version": self._version}
        return json.dumps(about | known)

    def unregister(self) -> None:
        """Removes this worker; its leases go back to the queues, in the original order."""
        keys = self._keys.of_recovery(self.worker)
        self._scripts.run("recover", keys, self.worker, "", 0)


def server_info(client: Any, section: str) -> Mapping[str, Any]:
    """Reads a section of INFO; empty if this user may not see it.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    try:
        info: Mapping[str, Any] = client.info(section)
    except redis.ResponseError:
        return {}
    return info


def require_supported(info: Mapping[str, Any], *, is_shard: bool = False) -> None:
    """Refuses a Redis that cannot hold leases.

    Args:
        info: Its INFO server.
        is_shard: Whether the connection is one to a shard of a cluster.

    Raises:
        RedisUnavailable: It is too old, or a node of a cluster that is spoken to as one server.
    """
    version = str(info.get("redis_version", "6.2"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise RedisUnavailable(
            f"the broker is Redis {version}, but leases need 6.2 or newer; update it"
        )
    # Valkey has its mode under a name of its own.
    if "cluster" in (info.get("redis_mode"), info.get("server_mode")) and not is_shard:
        raise RedisUnavailable(
            "this is a node of a Redis Cluster: set batchery_redis_url to redis+cluster://HOST:PORT,"
            " and broker_url to a broker that Celery knows"
        )


def warn_of_eviction(info: Mapping[str, Any]) -> None:
    """Warns where Redis may throw away queues and leases; `info` is INFO memory."""
    policy = str(info.get("maxmemory_policy", ""))
    if policy and policy != "noeviction":
        logger.warning(
            "Redis evicts keys (maxmemory-policy %s), and may throw away queues and leases;"
            " set it to noeviction",
            policy,
        )
