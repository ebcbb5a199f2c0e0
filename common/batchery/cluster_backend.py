"""Celery's result backend on a Redis Cluster: `result_backend = "redis+cluster://host:port,..."`.

All keys of a job lie in the shard of its id, and those of a group, such as a chord's, in the shard
of the group's. So the scripts of Celery and of ours work on them as they do on one server.
"""

import time
from functools import cached_property, partial
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from batchery.broker_url import is_cluster, read_cluster_url
from batchery.cluster_client import ClusterClient, ShardPools
from batchery.transport.cluster import find_shard, list_tags, slot_options

#: How often results are looked for that are awaited, in seconds: what a node announces that dies
#: just then may reach no other one.
LOOK_S = 2.0

#: How often a command is tried again, with pauses of at most a second: for seven seconds.
FAILOVER_TRIES = 10

_Backend: Any = RedisBackend
_Consumer: Any = _Backend.ResultConsumer


class ClusterResultConsumer(_Consumer):  # type: ignore[misc]
    """Waits for results by a subscription, and looks for them now and then."""

    _look_at_s = 0.0

    def drain_events(self, timeout: float | None = None) -> None:
        """Waits for messages, and takes what they tell of."""
        super().drain_events(timeout)
        if self.subscribed_to and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            with self.reconnect_on_error():
                for stored in filter(None, self.backend.client.mget(self.subscribed_to.copy())):
                    self.on_state_change(self.backend.decode_result(stored), None)


class ClusterBackend(_Backend):  # type: ignore[misc]
    """Results on a cluster. User, password and TLS are read from its URL alone."""

    ResultConsumer = ClusterResultConsumer

    @cached_property
    def client(self) -> ClusterClient:
        """The client of all threads, which waits while a node's replica takes its place."""
        retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), FAILOVER_TRIES)
        made: ClusterClient = self._create_client(**{**self.connparams, "retry": retry})
        return made

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        _, options = read_cluster_url(url)
        self._cluster_url = url
        nowhere = {**defaults, **options}
        return {name: nowhere[name] for name in nowhere if name not in ("host", "port", "db")}

    def _get_pool(self, **params: Any) -> ShardPools:
        params.pop("connection_class", None)
        shards = enumerate(list_tags())
        own = {tag.encode(): {**slot_options(self._cluster_url, n), **params} for n, tag in shards}
        return ShardPools(own)

    def _get_client(self) -> type[ClusterClient]:
        return ClusterClient

    def _get_key_for(self, prefix: bytes, id: Any, key: str | bytes = "") -> bytes:  # noqa: A002
        shard = find_shard(id if isinstance(id, bytes) else str(id))
        found: bytes = super()._get_key_for(prefix, id, key)
        return list_tags()[shard].encode() + found

    def as_uri(self, include_password: bool = False) -> str:
        """The URL, with or without the password."""
        if include_password:
            return str(self.url)
        scheme, _, rest = self.url.partition("://")
        user, at, hosts = rest.rpartition("@")
        return f"{scheme}://{user.partition(':')[0]}{':**' if ':' in user else ''}{at}{hosts}"


def make_backend(
    app: Celery, url: str | None = None, *, scheme: str = "redis", **options: Any
) -> Any:
    """Makes the result backend for `redis://...` and `redis+cluster://...`.

    Args:
        app: The app.
        url: What Celery makes of the setting: of that of a cluster, what follows `redis+`.
        scheme: What came before.
        options: Further ones of Celery's backend.
    """
    if url is not None and is_cluster(cluster_url := f"{scheme}+{url}"):
        return ClusterBackend(app=app, url=cluster_url, **options)
    return _Backend(app=app, url=url, **options)


make_secure_backend = partial(make_backend, scheme="rediss")


def use_cluster_results(app: Any) -> None:
    """Has an app know the URLs of clusters as result backends; nothing else changes."""
    ours = {"redis": f"{__name__}:make_backend", "rediss": f"{__name__}:make_secure_backend"}
    app.loader.override_backends = {**ours, **app.loader.override_backends}
