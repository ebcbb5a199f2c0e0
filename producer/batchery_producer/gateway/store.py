"""The Redis of the results, and the queue of the gateway's own jobs.

In that Redis gateways and their jobs keep what a kill must not lose. The jobs, steps of batch files
and webhooks, are ordinary Celery tasks, run by an ordinary worker, so leases, heartbeats and
redelivery are the queue's.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.gateway_settings import JOBS_QUEUE
from batchery.protocol.headers import backend_prefix, with_tenant
from batchery_producer.gateway.problems import Kind, Problem, redis_problem

#: The task that begins a batch, or runs a slice of one.
BATCH = "batchery.gateway.batch"


class Store:
    """Runs commands on the result backend's Redis.

    Its keys begin like those of results, so that apps with prefixes of their own stay apart.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
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
        """Calls a function with the Redis client."""
        with self.client() as client:
            return call(client)

    @contextmanager
    def client(self) -> Iterator[Any]:
        """The Redis client.

        Raises:
            Problem: Redis is away, or is not the app's result backend.
        """
        if not self._is_redis:
            raise Problem(
                Kind.UNAVAILABLE, "this route needs a Redis as result backend; set result_backend"
            )
        try:
            yield self.backend.client
        except redis.RedisError as error:
            raise redis_problem(error) from error

    def send(self, task: str, *arguments: Any, tenant: str | None = None) -> None:
        """Sends one of the gateway's own jobs.

        Raises:
            OperationalError: kombu's; the broker is away.
        """
        options = with_tenant({"queue": JOBS_QUEUE, "ignore_result": True}, tenant)
        self._app.send_task(task, arguments, **options)
