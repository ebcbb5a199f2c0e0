"""A lean client: sends jobs and awaits their results, hundreds at a time, on one event loop.

It costs a fraction of Celery's own, so that the worker is measured and not the client: one copied
message per job, and one subscription for the results of all jobs.
"""

import asyncio
import base64
import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from redis.asyncio import Redis

#: What Celery calls a result, as key and as channel.
RESULT = "celery-task-meta-"

#: More than callers at a time.
MAX_CONNECTIONS = 1000

#: Timeout of one answer, in seconds.
TIMEOUT_S = 600.0

#: Answers per caller that a measurement waits for, where its seconds are over before.
PER_CALLER = 2

#: Pause between two looks whether they are there, in seconds.
LOOK_S = 0.02


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


class Window(NamedTuple):
    """What was measured in a steady state.

    Attributes:
        taken_s: How long each request took that ended in the window, from before its job was
            written to its result, in seconds.
        seconds: Length of the window.
    """

    taken_s: Sequence[float]
    seconds: float

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return len(self.taken_s) / self.seconds


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

    async def measure(
        self, queue: str, texts: Sequence[str], concurrency: int, warm_up_s: float, seconds: float
    ) -> Window:
        """Keeps so many callers busy, each of which sends the next text once it has an answer.

        The clock starts when all callers have had an answer and `warm_up_s` is over: what the
        device does for the first time is done then. It stops after `seconds`, or later, when there
        are two answers for each caller.
        """
        left, state = itertools.cycle(texts), _Callers(concurrency)
        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(self._caller(number, queue, left, state))
            await asyncio.sleep(warm_up_s)
            await state.all_answered.wait()
            state.taken_s, began_s = [], time.perf_counter()
            await asyncio.sleep(seconds)
            while len(state.taken_s) < PER_CALLER * concurrency:
                await asyncio.sleep(LOOK_S)
            window = Window(state.taken_s, time.perf_counter() - began_s)
            state.taken_s, state.are_done = [], True
        return window

    async def _caller(
        self, number: int, queue: str, texts: Iterator[str], state: "_Callers"
    ) -> None:
        while not state.are_done:
            started_s = time.perf_counter()
            await self.call(queue, next(texts))
            state.taken_s.append(time.perf_counter() - started_s)
            state.waiting.discard(number)
            if not state.waiting:
                state.all_answered.set()


class _Callers:
    """What the callers of a measurement share."""

    def __init__(self, count: int) -> None:
        #: Those that have had no answer yet.
        self.waiting = set(range(count))
        self.all_answered = asyncio.Event()
        self.taken_s: list[float] = []
        #: Whether they send no more.
        self.are_done = False
