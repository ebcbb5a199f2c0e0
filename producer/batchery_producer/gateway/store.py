"""The Redis of the results, in which gateways and their jobs keep what a kill must not lose."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.protocol.completion_stream import backend_prefix
from batchery.redis_scripts import RedisScripts
from batchery_producer.gateway.problems import Kind, Problem, redis_problem

LUA = Path(__file__).parent / "lua"


class Store:
    """Runs commands on the result backend's Redis.

    Its keys begin like those of results, so that apps with prefixes of their own stay apart.
    """

    def __init__(self, app: Celery) -> None:
        """Prepares; does not connect."""
        #: Celery's backend; one for all threads, as its client is.
        self.backend: Any = app.backend
        self._is_redis = isinstance(self.backend, RedisBackend)
        self._prefix = backend_prefix(self.backend) if self._is_redis else b""

    def key(self, *parts: str) -> bytes:
        """A key of the gateway's own."""
        return self._prefix + b":".join((b"batchery:http", *(part.encode() for part in parts)))

    async def run(self, call: Callable[[Any], Any]) -> Any:
        """As `call`, on another thread."""
        return await asyncio.to_thread(self.call, call)

    def call(self, call: Callable[[Any], Any]) -> Any:
        """Calls a function with the Redis client.

        Raises:
            Problem: Redis is away, or is not the app's result backend.
        """
        if not self._is_redis:
            raise Problem(
                Kind.UNAVAILABLE, "this route needs a Redis as result backend; set result_backend"
            )
        try:
            return call(self.backend.client)
        except redis.RedisError as error:
            raise redis_problem(error) from error

    def script(self, name: str, keys: Sequence[bytes], *arguments: Any) -> Any:
        """Runs one of the gateway's scripts.

        Raises:
            Problem: As `call`.
        """
        return self.call(lambda client: RedisScripts(client, LUA).run(name, keys, *arguments))
