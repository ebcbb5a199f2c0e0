"""The brokers of an app, for parts of a worker that go to Redis themselves."""

import contextlib
from collections.abc import Iterator
from typing import Any

from celery import Celery


def list_brokers(app: Celery) -> list[str | None]:
    """The brokers of an app, in its order; None is all that its settings name, as one.

    All Sentinels of a list name the same one.
    """
    with app.connection_for_read() as connection:
        alternatives: list[str | None] = list(connection.alt or ())
        if len(alternatives) < 2 or connection.transport_cls == "sentinel":
            return [None]
        return alternatives


@contextlib.contextmanager
def open_channel(app: Celery, broker: str | None = None) -> Iterator[Any]:
    """A channel to a broker, or to the first one that answers; each address is tried once.

    Raises:
        redis.RedisError: It does not answer.
        OSError: The same.
    """
    with app.connection_for_read(broker) as connection:
        connection.ensure_connection(
            max_retries=len(connection.alt or ()),
            interval_start=0,
            reraise_as_library_errors=False,
        )
        channel: Any = connection.channel()
        with contextlib.closing(channel):
            yield channel
