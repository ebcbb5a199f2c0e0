"""Live jobs that arrive by chance, and how long each takes from its push to its result."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio import Redis

from benchmarks.engine.client import ResultListener
from benchmarks.scheduling.messages import Template

#: How the ids of live jobs begin: so this client hears of no other results.
MARK = "11fe11fe"

#: Timeout of one answer, in seconds.
TIMEOUT_S = 60.0

#: Length of a stretch with live jobs, and of one without, in seconds; longer for larger jobs.
STRETCH_S = 5.0


class Answer(NamedTuple):
    """A live job that was answered."""

    latency_ms: float
    #: What the worker says of its batch: id, size and stages.
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some seconds of bulk, with live jobs or without; in seconds of the epoch."""

    begin_s: float
    end_s: float
    is_live: bool
    answers: Sequence[Answer] = ()
    #: The most by which a job was published later than drawn, in ms.
    lag_ms: float = 0.0


class LiveClient(ResultListener):
    """Calls a task, and hears of the results of its own jobs only."""

    def __init__(self, url: str) -> None:
        """Does not connect yet."""
        super().__init__(Redis.from_url(url), MARK)

    async def call(self, template: Template, body: str) -> Answer:
        """Sends a job and waits for its result.

        Raises:
            SystemExit: The job failed, or there is no answer.
        """
        task_id = MARK + str(uuid.uuid4())[len(MARK) :]
        future = self.expect(task_id)
        job = template.copy(task_id, body)
        began_s = time.perf_counter()
        await self._redis.lpush(template.key, job)
        try:
            ended_s, data = await asyncio.wait_for(future, TIMEOUT_S)
        except TimeoutError:
            raise SystemExit(f"a live job has no result after {TIMEOUT_S:g} s") from None
        answer = json.loads(data)
        if answer["status"] != "SUCCESS":
            raise SystemExit(f"a live job failed: {answer['result']}")
        return Answer((ended_s - began_s) * 1e3, answer["batch"])

    async def stretch(
        self, template: Template, bodies: Sequence[str], due_s: Sequence[float], seconds: float
    ) -> Stretch:
        """Lets live jobs come at these times; without any there is bulk alone.

        Args:
            template: Of the jobs.
            bodies: Of the jobs, in turn.
            due_s: When each is sent, in seconds after the begin; ascending.
            seconds: How long the stretch is.
        """
        lag_ms, calls = 0.0, []
        began_s, began = time.time(), time.perf_counter()
        for number, moment_s in enumerate(due_s):
            await asyncio.sleep(max(0.0, moment_s - (time.perf_counter() - began)))
            lag_ms = max(lag_ms, (time.perf_counter() - began - moment_s) * 1e3)
            body = bodies[number % len(bodies)]
            calls.append(asyncio.create_task(self.call(template, body)))
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        ended_s = time.time()
        answers = await asyncio.gather(*calls)
        return Stretch(began_s, ended_s, bool(due_s), answers, lag_ms)


def arrivals(per_s: float, seconds: float, seed: str) -> list[float]:
    """Draws when jobs come: Poisson arrivals, the same for the same seed; at least one."""
    draw = random.Random(seed)
    due_s, times_s = draw.expovariate(per_s), []
    while due_s < seconds:
        times_s.append(due_s)
        due_s += draw.expovariate(per_s)
    return times_s or [seconds / 2]
