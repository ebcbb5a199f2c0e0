"""Kombu's Redis transport, with the mends of `channel.py`; any Celery app on Redis can use it.

`install(app)` puts it in the place of kombu's own for `redis://`, `rediss://` and `sentinel://`.
An app that has not called `install` sets `broker_transport = "batchery.transport:Transport"`.
Nothing differs on the wire: producers and workers with kombu's Redis transport share the queues.
"""

from typing import Any

import kombu.transport
import redis
from kombu.transport import redis as kombu_redis

from batchery.errors import SettingsError
from batchery.transport.channel import Channel, ClusterChannel, SentinelChannel

__all__ = [
    "NEEDS_WRITES",
    "REFUSALS",
    "ClusterTransport",
    "SentinelTransport",
    "Transport",
    "use_transport",
]

#: Transport option of a worker's connection: a server that takes no writes counts as away.
NEEDS_WRITES = "needs_writes"

#: What a server raises that takes no writes: it is a replica, or full.
REFUSALS = (redis.ReadOnlyError, redis.OutOfMemoryError)

_Transport: Any = kombu_redis.Transport


class Transport(_Transport):  # type: ignore[misc]
    """Kombu's Redis transport, with channels of ours; a worker outlives a server without writes."""

    Channel = Channel

    def establish_connection(self) -> Any:
        """Connects.

        Raises:
            SettingsError: Its URL is that of a cluster.
            redis.ConnectionError: No server answers; or it takes no writes, and must.
        """
        # Kombu takes `redis+cluster://` for its Redis transport, with the rest as a host.
        if str(self.client.hostname).startswith("cluster://"):
            raise SettingsError(
                "broker_url is a Redis Cluster, which cannot be Celery's broker; set"
                " batchery_redis_url to it (BATCHERY_REDIS_URL), and broker_url to a broker that"
                " Celery knows (CELERY_BROKER_URL)"
            )
        connection = super().establish_connection()
        if self.client.transport_options.get(NEEDS_WRITES):
            try:
                # A write that removes nothing: also a full server takes it, and a replica does not.
                self._avail_channels[-1].client.hdel("batchery:worker-info", "")
            except redis.ResponseError as error:
                self.close_connection(connection)
                raise redis.ConnectionError(f"the broker takes no writes: {error}") from error
        return connection


class SentinelTransport(Transport):
    """The same transport, behind Redis Sentinel."""

    default_port = 26379
    Channel = SentinelChannel


class ClusterTransport(Transport):
    """The same transport, of one shard of a Redis Cluster."""

    Channel = ClusterChannel


def use_transport() -> None:
    """Makes this the transport of Redis URLs in this process.

    It goes by the URL's scheme. The setting `broker_transport` would not survive a failover to the
    next URL of a list, and would also apply to brokers that are no Redis.
    """
    for scheme, name in (
        ("redis", "Transport"),
        ("rediss", "Transport"),
        ("sentinel", "SentinelTransport"),
    ):
        kombu.transport.TRANSPORT_ALIASES[scheme] = f"{__name__}:{name}"
        cache: dict[str, Any] = vars(kombu.transport)["_transport_cache"]
        cache.pop(scheme, None)
