"""How a channel connects: its parameters, its clients, and clients that outlive it."""

from typing import TYPE_CHECKING, Any

import redis

if TYPE_CHECKING:
    _Channel: Any
else:
    _Channel = object

#: How long an answer of Redis may take, in seconds, where the transport options say nothing: the
#: event loop waits for it, and a connection may be dead without telling.
SOCKET_TIMEOUT_S = 10.0


class ConnectingChannel(_Channel):  # type: ignore[misc]
    """Mixed into kombu's Redis channels."""

    #: Client for single commands.
    _client_for_commands: Any = None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection is None or self.connection.client is None:
            # Kombu itself stumbles over that, with an error that ends Celery's worker.
            raise redis.ConnectionError("the channel is closed")
        params: dict[str, Any] = super()._connparams(asynchronous)
        if params.get("socket_timeout") is None:
            params["socket_timeout"] = SOCKET_TIMEOUT_S
        if asynchronous:
            params["protocol"] = 3  # Pushes need RESP3.
        return params

    def _create_client(self, asynchronous: bool = False) -> Any:
        if asynchronous:
            return super()._create_client(asynchronous=True)
        # Kombu makes one for each command: 0.1 ms, a tenth of what `delay` and `get` cost a caller.
        known = self._client_for_commands
        if known is None or known.connection_pool is not self.pool:
            known = self._client_for_commands = super()._create_client()
        return known

    def _client_of_its_own(self, timeout_s: float) -> Any:
        """With a pool of its own: it outlives the channel, and waits for nobody."""
        pool = self._get_pool()
        given = pool.connection_kwargs.get("socket_timeout") or timeout_s
        pool.connection_kwargs["socket_timeout"] = min(given, timeout_s)
        return redis.Redis(connection_pool=pool)

    def _place(self) -> tuple[Any, ...]:
        """Identity of the broker's database."""
        params = self._connparams()
        names = [str(params.get(name)) for name in ("host", "port", "path", "db")]
        # Behind one Sentinel there may be several masters.
        return (*names, getattr(self, "master_name", None), self.global_keyprefix)
