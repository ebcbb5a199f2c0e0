"""Large items by reference: a client puts bytes into Redis, and sends `batchery:ID` as the item.

The key of the bytes is `batchery:media:ID`, a string with an expiry, in the Redis of the result
backend, or else in that of the broker. It has the prefix of the keys there.
"""

import re
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.protocol.headers import backend_prefix
from batchery.transport.channel import SOCKET_TIMEOUT_S

#: How a reference begins.
PREFIX = "batchery:"

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_payload_id(text: str) -> bool:
    """Whether a text may be the id of bytes in Redis."""
    return _ID.fullmatch(text) is not None


class Payloads:
    """The Redis of an app that has such bytes; threads may share it."""

    def __init__(self, client: "redis.Redis", find_prefix: Callable[[str], str]) -> None:
        """Remembers the client, and what finds the prefix of the key with an id."""
        self.client = client
        self._find_prefix = find_prefix

    @classmethod
    def open(cls, app: Celery) -> "Payloads | None":
        """Finds it, without connecting; None if neither backend nor broker is a Redis."""
        backend: Any = app.backend
        if isinstance(app.backend, RedisBackend):
            options = dict(backend.connparams)
            for name in ("socket_timeout", "socket_connect_timeout"):
                if name in options:  # A connection by a Unix socket knows only one of them.
                    options[name] = SOCKET_TIMEOUT_S
            client = backend._create_client(**options)
            return cls(client, lambda payload_id: backend_prefix(backend, payload_id).decode())
        with app.connection_for_write() as connection:
            if connection.transport.driver_type != "redis":
                return None
            channel: Any = connection.default_channel
            # An app that `install` never saw has kombu's own channels.
            if hasattr(channel, "_make_separate_client"):
                client = channel._make_separate_client(SOCKET_TIMEOUT_S)
            else:
                client = redis.Redis(connection_pool=channel._get_pool())
            return cls(client, lambda _: channel.global_keyprefix)

    def key(self, payload_id: str) -> str:
        """The key of the bytes with an id."""
        return f"{self._find_prefix(payload_id)}batchery:media:{payload_id}"

    def read(self, payload_id: str, max_bytes: int) -> bytes | None:
        """The bytes with an id, at most one more than a maximum; None if they are not there.

        Raises:
            redis.RedisError: Redis does not answer, or has something else there.
        """
        found: Any = self.client.getrange(self.key(payload_id), 0, max_bytes)
        return bytes(found) if found else None
