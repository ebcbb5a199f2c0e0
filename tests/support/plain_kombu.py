"""Consumers that use only kombu, with its event loop or without."""

from collections.abc import Mapping
from typing import Any

import kombu

OURS = "batchery.transport:Transport"


def send(
    url: str,
    queue: str,
    *texts: str,
    transport: str | None = "kombu.transport.redis:Transport",
    options: Mapping[str, Any] | None = None,
    **properties: Any,
) -> None:
    """Sends messages like a stock client."""
    connection: Any = kombu.Connection(
        url, transport=transport, transport_options=dict(options or {})
    )
    with connection, connection.Producer() as producer:
        for text in texts:
            producer.publish(text, serializer="json", routing_key=queue, exchange="", **properties)


def waiting(client: Any, queue: str = "q") -> int:
    """How many messages are in a queue."""
    return int(client.llen(queue))


def leases(client: Any) -> int:
    """How many leases there are, of all workers."""
    return sum(client.hlen(key) for key in client.keys("*batchery:lease:*"))
