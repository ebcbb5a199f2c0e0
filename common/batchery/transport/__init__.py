"""A kombu transport that leases messages in bulk; any Celery app on Redis can use it.

`install(app)` puts it in the place of kombu's own for `redis://`, `rediss://` and `sentinel://`.
An app that has not called `install` sets `broker_transport = "batchery.transport:Transport"`.
Nothing differs on the wire: producers and workers with kombu's Redis transport share the queues.
"""

from typing import Any

import kombu.transport
import redis
from kombu.transport import redis as kombu_redis

from batchery.transport.channel import Channel, SentinelChannel
from batchery.transport.poller import SWEEP_INTERVAL_S, Poller

__all__ = ["NEEDS_WRITES", "SentinelTransport", "Transport", "use_leases"]

#: Transport option of a worker's connection: a server that takes no writes counts as away.
NEEDS_WRITES = "needs_writes"

_Transport: Any = kombu_redis.Transport


class Transport(_Transport):  # type: ignore[misc]
    """Kombu's Redis transport, with leases where a channel consumes."""

    Channel = Channel
    #: Celery's event loop; None in a client, and in a worker that has none.
    _loop: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = Poller()
        #: What the loop calls in each of its turns for this transport.
        self._ticks = set[Any]()

    def establish_connection(self) -> Any:
        """Connects.

        Raises:
            redis.ConnectionError: No server answers; or it takes no writes, and must.
        """
        connection = super().establish_connection()
        if self.client.transport_options.get(NEEDS_WRITES):
            try:
                # A write that removes nothing: also a full server takes it, and a replica does not.
                self._avail_channels[-1].client.hdel("batchery:worker-info", "")
            except redis.ResponseError as error:
                self.close_connection(connection)
                raise redis.ConnectionError(f"the broker takes no writes: {error}") from error
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Adds the transport to Celery's event loop."""
        self._leave_loop()
        before = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)
        self._loop = loop
        cycle = self.cycle
        timer = getattr(cycle, "_sweep_tref", None)
        if timer is not None:
            timer.cancel()
        cycle._sweep_tref = loop.call_repeatedly(SWEEP_INTERVAL_S, cycle.sweep)
        loop.on_tick.add(cycle.flush)
        self._ticks = loop.on_tick - before

    def close_connection(self, connection: Any) -> None:
        """Closes a connection and its channels.

        Kombu would leave its calls on the loop: for each connection that a worker has ever lost, a
        transport that is kept, and two calls in each turn.
        """
        super().close_connection(connection)
        self._leave_loop()

    def _leave_loop(self) -> None:
        if self._loop is not None:
            self._loop.on_tick -= self._ticks

    def wake(self) -> None:
        """Lets the worker ask for messages once more before it sleeps; from any thread."""
        if self._loop is not None:
            self._loop.call_soon(_do_nothing)
        else:
            self.cycle.wake()

    def _collect(self, connection: Any) -> None:
        """Leaves a connection that broke, and keeps its leases; the name is kombu's."""
        for channel in list(self.channels):
            channel.is_broken = True
        self.close_connection(connection)


class SentinelTransport(Transport):
    """The same transport, behind Redis Sentinel."""

    default_port = 26379
    Channel = SentinelChannel


def _do_nothing() -> None:
    """What the loop is woken for stands in its next turn: it asks for messages before it sleeps."""


def use_leases() -> None:
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
