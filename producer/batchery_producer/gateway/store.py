"""The Redis of the results, and the queue of the gateway's own jobs.

In that Redis gateways and their jobs keep what a kill must not lose. The jobs, turns of batch files
and attempts of webhooks, are ordinary Celery tasks, run by an ordinary worker, so leases,
heartbeats and redelivery are the queue's. A sorted set says when each piece of work is due again:
that is the timer of what waits for a retry, and the net under a message that was lost.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery.gateway_settings import JOBS_QUEUE
from batchery.protocol.headers import backend_prefix, with_tenant
from batchery.redis_scripts import RedisScripts
from batchery_producer.gateway.problems import Kind, Problem, redis_problem

LUA = Path(__file__).parent / "lua"


class Store:
    """Runs commands on the result backend's Redis.

    Its keys begin like those of results, so that apps with prefixes of their own stay apart.
    """

    def __init__(self, app: Celery) -> None:
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

    def take_due(self, key: bytes, maximum: int, again_s: float) -> list[str]:
        """Members of a sorted set that are due by now, which are due again in so many seconds."""
        now_s = time.time()
        with self.client() as client:
            due = client.zrangebyscore(key, "-inf", now_s, 0, maximum)
            if due:
                client.zadd(key, dict.fromkeys(due, now_s + again_s), xx=True)
        return [each.decode() for each in due]

    def script(self, name: str, keys: Sequence[bytes], *arguments: Any) -> Any:
        """Runs one of the gateway's scripts."""
        return self.call(lambda client: RedisScripts(client, LUA).run(name, keys, *arguments))


# Jobs


#: Kinds of work, and the tasks that do it.
BATCH = "batch"
WEBHOOK = "webhook"
TASKS = {BATCH: "batchery.gateway.batch", WEBHOOK: "batchery.gateway.webhook"}

#: After so long without a sign of life, in seconds, a job is sent again: its message was lost.
LOST_S = 60.0

#: Maximum pieces of work that one look takes.
MAX_DUE = 1000


class JobQueue:
    """Sends the gateway's own jobs.

    A piece of work is a kind and ids without spaces, such as `webhook 7d3c...`.
    """

    def __init__(self, app: Celery, store: Store) -> None:
        self._app = app
        self._store = store
        #: The sorted set: work by when it is due, in Unix seconds.
        self.due_key = store.key("due")

    def send(self, work: str, *arguments: Any, tenant: str | None = None) -> None:
        """Sends a job.

        Raises:
            OperationalError: kombu's; the broker is away.
        """
        kind, *ids = work.split(" ")
        options = with_tenant({"queue": JOBS_QUEUE, "ignore_result": True}, tenant)
        self._app.send_task(TASKS[kind], [*ids, *arguments], **options)

    def callback(self, work: str, *arguments: Any, tenant: str | None = None) -> Any:
        """The job as a callback of another task, whose result it does not get."""
        kind, *ids = work.split(" ")
        return self._app.signature(
            TASKS[kind],
            args=[*ids, *arguments],
            immutable=True,
            options=with_tenant({"queue": JOBS_QUEUE}, tenant),
        )

    def postpone(self, work: str, seconds: float = LOST_S) -> None:
        """Has a job sent again in so many seconds, unless it is done or postponed by then.

        Raises:
            Problem: Redis is away.
        """
        self._store.call(lambda client: client.zadd(self.due_key, {work: time.time() + seconds}))

    def forget(self, work: str) -> None:
        """Has a job sent no more."""
        self._store.call(lambda client: client.zrem(self.due_key, work))

    def take_due(self) -> list[str]:
        """The work that is due; it counts as sent.

        Raises:
            Problem: Redis is away.
        """
        return self._store.take_due(self.due_key, MAX_DUE, LOST_S)
