"""Jobs that arrive by chance: published one by one, their results read and removed as they come.

It has the processor for some per cent of the time, as the worker needs it: a job is a copy of a
message, and of a stored result only the head is read, which says when its batch was done.
"""

import json
import random
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psutil

from benchmarks.engine.client import RESULT, job_of

#: Time between two looks for results, in seconds.
COLLECT_S = 0.25

#: Most results of a look, so that the next job does not wait for it.
COLLECT_JOBS = 256

#: Bytes of a stored result that are read: its status, and the facts of its batch.
HEAD_BYTES = 1023

#: Time between two looks at memory, in seconds.
WEIGH_S = 1.0

#: How long the last results may take, in seconds.
DRAIN_S = 120.0

HEAD = re.compile(rb'^{"status": "SUCCESS".*?"date_done": "([^"]+)", "batch": (\{[^}]*\})')


@dataclass(slots=True)
class Observed:
    """What was seen of a run."""

    #: Of each job its batch, and the time from just before it was published to the start of its
    #: forward pass, in ms: at most, as the time between the forward pass and the commit counts as
    #: waiting.
    waits_ms: list[tuple[int, float]] = field(default_factory=list)
    #: Number of each batch, in the order in which they ran -> how long it was computed, in ms.
    forward_ms: dict[int, float] = field(default_factory=dict)
    #: Of each job, how much later than drawn it was published, in ms.
    lags_ms: list[float] = field(default_factory=list)
    #: Resident memory of each process once a second, in MiB.
    memory: list[dict[str, float]] = field(default_factory=list)
    failed: int = 0
    #: Processor time of publishing and collecting.
    cpu_s: float = 0.0


class Load:
    """Publishes jobs at random times, and sees what becomes of them."""

    def __init__(
        self,
        redis: Any,
        message: bytes,
        queue: str,
        processes: Mapping[str, psutil.Process],
    ) -> None:
        """Sends nothing yet.

        Args:
            redis: Of the queue and of the results.
            message: A real one, as it stands in a queue.
            queue: Where they go.
            processes: Whose memory is weighed, by what they are for.
        """
        self._redis = redis
        self._message = json.loads(message)
        self._queue = queue
        self._processes = processes
        #: Id of each job without a result, and when it was published, in seconds of the epoch.
        self._pending: deque[tuple[str, float]] = deque()
        self._seen = Observed()

    def run(self, texts: Sequence[str], jobs_per_s: float, seconds: float, seed: int) -> Observed:
        """Publishes at that rate for so long, with Poisson arrivals, and waits for the rest.

        Raises:
            SystemExit: Results do not come.
        """
        cpu_s = time.process_time()
        draw = random.Random(seed)
        items = _endless(texts, draw)
        began_s = time.perf_counter()
        due_s = draw.expovariate(jobs_per_s)
        look_s = weigh_s = 0.0
        while due_s < seconds:
            now_s = time.perf_counter() - began_s
            if now_s >= due_s:
                self._publish(next(items))
                self._seen.lags_ms.append((now_s - due_s) * 1e3)
                due_s += draw.expovariate(jobs_per_s)
            elif now_s >= weigh_s:
                self._weigh()
                weigh_s += WEIGH_S
            elif now_s >= look_s:
                is_behind = self._collect()
                look_s = now_s + (0 if is_behind else COLLECT_S)
            else:
                time.sleep(min(due_s, weigh_s, look_s) - now_s)
        self._drain()
        self._seen.cpu_s = time.process_time() - cpu_s
        return self._seen

    def _publish(self, text: str) -> None:
        task_id = str(uuid.uuid4())
        job = job_of(self._message, task_id, self._queue, text)
        self._pending.append((task_id, time.time()))
        self._redis.lpush(self._queue, job)

    def _weigh(self) -> None:
        self._seen.memory.append(
            {
                name: round(process.memory_info().rss / 2**20, 1)
                for name, process in self._processes.items()
            }
        )

    def _drain(self) -> None:
        deadline_s = time.monotonic() + DRAIN_S
        while self._pending:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{len(self._pending)} jobs have no result after {DRAIN_S:g} s")
            self._collect()
            time.sleep(COLLECT_S)

    def _collect(self) -> bool:
        """Reads and removes what is there of the oldest results: they come in order, nearly.

        Returns:
            Whether there may be more.
        """
        jobs = [self._pending.popleft() for _ in range(min(COLLECT_JOBS, len(self._pending)))]
        with self._redis.pipeline(transaction=False) as reading:
            for task_id, _ in jobs:
                reading.getrange(f"{RESULT}{task_id}", 0, HEAD_BYTES)
            heads = reading.execute()
        for job, head in reversed(list(zip(jobs, heads, strict=True))):
            if not head:
                self._pending.appendleft(job)
        done = [(job, head) for job, head in zip(jobs, heads, strict=True) if head]
        if done:
            self._redis.unlink(*(f"{RESULT}{task_id}" for (task_id, _), _ in done))
        for (_, published_s), head in done:
            self._note(published_s, head)
        return len(done) == COLLECT_JOBS

    def _note(self, published_s: float, head: bytes) -> None:
        found = HEAD.match(head)
        if found is None:
            self._seen.failed += 1
            return
        info = json.loads(found[2])
        batch, forward_ms = int(info["id"].removeprefix("b")), info["forward_ms"]
        done_s = datetime.fromisoformat(found[1].decode()).timestamp()
        wait_ms = (done_s - published_s) * 1e3 - forward_ms
        self._seen.waits_ms.append((batch, max(0.0, wait_ms)))
        self._seen.forward_ms[batch] = forward_ms


def _endless(texts: Sequence[str], draw: random.Random) -> Iterator[str]:
    while True:
        yield draw.choice(texts)
