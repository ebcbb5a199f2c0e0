"""A trace of jobs, played against a real worker: each job is sent at its time.

The latency of a job counts from the time at which the trace wanted it. So a client that is late
cannot hide that its jobs waited.
"""

import asyncio
import json
import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio import Redis

from benchmarks.engine.client import ResultListener
from benchmarks.scheduling.messages import Template, stamp

#: How long the last results may take after the last job was sent, in seconds.
TIMEOUT_S = 120.0


class Call(NamedTuple):
    """A job of a trace."""

    #: When it comes, in seconds after the begin.
    due_s: float
    priority_class: str
    template: Template
    body: str
    #: Of its text; 0 where there is none.
    tokens: int = 0


class Heard(NamedTuple):
    """A job whose result came."""

    priority_class: str
    #: From the time at which it was due.
    latency_s: float
    #: What the worker says of its batch: id, size and stages.
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a trace."""

    heard: Sequence[Heard]
    #: From the begin to the last result.
    seconds: float
    #: By how much each job was sent later than due.
    lags_s: Sequence[float]


class Player(ResultListener):
    """Sends jobs at their times, and hears of all results."""

    def __init__(self, url: str) -> None:
        """Does not connect yet."""
        super().__init__(Redis.from_url(url))

    async def play(self, calls: Sequence[Call]) -> Played:
        """Sends the jobs and waits for their results.

        Args:
            calls: In the order of time.

        Raises:
            SystemExit: A job failed, or there is no answer.
        """
        ids = [str(uuid.uuid4()) for _ in calls]
        jobs = [
            call.template.copy(task_id, call.body) for task_id, call in zip(ids, calls, strict=True)
        ]
        futures = [self.expect(task_id) for task_id in ids]
        due_s = [call.due_s for call in calls]
        lags_s: list[float] = []
        began_s = time.perf_counter()
        while (sent := len(lags_s)) < len(calls):
            await asyncio.sleep(due_s[sent] - (time.perf_counter() - began_s))
            now_s = time.perf_counter() - began_s
            # All that are due by now go in one round trip.
            end = max(sent + 1, bisect_right(due_s, now_s))
            async with self._redis.pipeline(transaction=False) as sending:
                for call, job in zip(calls[sent:end], jobs[sent:end], strict=True):
                    sending.lpush(call.template.key, stamp(job, time.time()))
                await sending.execute()
            lags_s += [max(0.0, now_s - each) for each in due_s[sent:end]]
        try:
            answers = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
        except TimeoutError:
            missing = sum(not future.done() for future in futures)
            raise SystemExit(f"{missing} jobs have no result after {TIMEOUT_S:g} s") from None
        heard = [
            Heard(call.priority_class, at_s - began_s - call.due_s, _facts_of(data))
            for call, (at_s, data) in zip(calls, answers, strict=True)
        ]
        return Played(heard, max(at_s for at_s, _ in answers) - began_s, lags_s)


def _facts_of(data: bytes) -> Mapping[str, Any]:
    answer = json.loads(data)
    if answer["status"] != "SUCCESS":
        raise SystemExit(f"a job failed: {answer['result']}")
    info: Mapping[str, Any] = answer["batch"]
    return info
