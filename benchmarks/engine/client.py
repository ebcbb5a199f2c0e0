"""A lean client: sends jobs and awaits their results, hundreds at a time, on one event loop.

It costs a fraction of Celery's own, so that the worker is measured and not the client: one copied
message per job, and one subscription for the results of all jobs.
"""

import asyncio
import base64
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from redis.asyncio import Redis

#: What Celery calls a result, as key and as channel.
RESULT = "celery-task-meta-"

#: More than callers at a time.
MAX_CONNECTIONS = 1000

#: Timeout of one answer, in seconds.
TIMEOUT_S = 600.0


def job_of(message: Mapping[str, Any], task_id: str, queue: str, text: str) -> str:
    """A message as it stands in a queue, made of another one: with other ids and another item."""
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    body = base64.b64encode(json.dumps([[text], {}, embed]).encode()).decode()
    headers = {**message["headers"], "id": task_id, "root_id": task_id, "task": queue}
    properties = {
        **message["properties"],
        "correlation_id": task_id,
        "delivery_tag": task_id,
        "delivery_info": {"exchange": "", "routing_key": queue},
    }
    return json.dumps({**message, "body": body, "headers": headers, "properties": properties})


class ResultListener:
    """Hears of results by one subscription; an asynchronous context manager."""

    def __init__(self, redis: Any, prefix: str = "") -> None:
        """Does not connect yet.

        Args:
            redis: Asynchronous client of the Redis that has the results; closed at the end.
            prefix: What the ids of the jobs begin with.
        """
        self._redis = redis
        self._pattern = f"{RESULT}{prefix}*"
        self._pending: dict[bytes, asyncio.Future[tuple[float, bytes]]] = {}

    async def __aenter__(self) -> Self:
        self._channel = self._redis.pubsub()
        await self._channel.psubscribe(self._pattern)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await self._channel.aclose()
        await self._redis.aclose()

    async def _read(self) -> None:
        async for event in self._channel.listen():
            future = self._pending.pop(event["channel"], None)
            if future is not None and not future.done():
                future.set_result((time.perf_counter(), event["data"]))

    def expect(self, task_id: str) -> asyncio.Future[tuple[float, bytes]]:
        """When the result of a job comes, on the clock of `time.perf_counter`, and the result."""
        future = asyncio.get_running_loop().create_future()
        self._pending[f"{RESULT}{task_id}".encode()] = future
        return future


class Client(ResultListener):
    """Calls one task."""

    def __init__(self, url: str, message: bytes) -> None:
        """Does not connect yet.

        Args:
            url: Of the Redis that has the queues and the results.
            message: A real one, as it stands in a queue; its ids and its item are replaced.
        """
        super().__init__(Redis.from_url(url, max_connections=MAX_CONNECTIONS))
        self._message = json.loads(message)

    async def call(self, queue: str, text: str) -> None:
        """Sends a job and waits for its result.

        Raises:
            SystemExit: The job failed.
            TimeoutError: There is no answer.
        """
        task_id = str(uuid.uuid4())
        future = self.expect(task_id)
        await self._redis.lpush(queue, job_of(self._message, task_id, queue, text))
        _, data = await asyncio.wait_for(future, TIMEOUT_S)
        answer = json.loads(data)
        if answer["status"] != "SUCCESS":
            raise SystemExit(f"{queue}: {answer['result']}")

    async def flood(self, queue: str, texts: Sequence[str], concurrency: int) -> list[float]:
        """Sends all texts, so many at a time: whoever has an answer sends the next.

        Returns:
            How long each took, from before its job was written to its result, in seconds.
        """
        left = iter(texts)
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(self._caller(queue, left)) for _ in range(concurrency)]
        return [each for caller in callers for each in caller.result()]

    async def _caller(self, queue: str, texts: Iterable[str]) -> list[float]:
        taken = []
        for text in texts:
            started_s = time.perf_counter()
            await self.call(queue, text)
            taken.append(time.perf_counter() - started_s)
        return taken
