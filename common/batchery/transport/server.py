"""What the broker's server must be for leases: not too old, no cluster, and evicting nothing."""

import logging
from collections.abc import Mapping
from typing import Any

import redis

from batchery.errors import RedisUnavailable

logger = logging.getLogger("batchery.transport")

#: Oldest Redis that knows RPOP with a count and tracking over RESP3.
OLDEST_REDIS = (6, 2)


def facts_of(client: Any, section: str) -> Mapping[str, Any]:
    """A section of INFO; nothing where this user may not see it.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    try:
        facts: Mapping[str, Any] = client.info(section)
    except redis.ResponseError:
        return {}
    return facts


def refuse_unfit(info: Mapping[str, Any]) -> None:
    """Raises RedisUnavailable for a Redis that cannot hold leases."""
    version = str(info.get("redis_version", "6.2"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise RedisUnavailable(
            f"the broker is Redis {version}, but leases need 6.2 or newer;"
            " update it, or say broker_transport_options={'leases': False}"
        )
    if info.get("redis_mode") == "cluster":
        raise RedisUnavailable(
            "the broker is a Redis Cluster, where a script cannot reach several queues;"
            " use one server or Sentinel, or say broker_transport_options={'leases': False}"
        )


def warn_of_eviction(info: Mapping[str, Any]) -> None:
    """Warns where Redis may throw away queues and leases."""
    policy = str(info.get("maxmemory_policy", ""))
    if policy and policy != "noeviction":
        logger.warning(
            "Redis evicts keys (maxmemory-policy %s), and may throw away queues and leases;"
            " set it to noeviction",
            policy,
        )
