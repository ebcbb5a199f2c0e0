"""Bulk jobs that wait without end, and what became of those that ran: in a process of its own.

So it does not hold up the client whose latency is measured. Of a stored result only the head is
read, which says when its batch was done and how long it was computed; then the result is removed.
"""

import itertools
import json
import multiprocessing
import signal
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from redis import Redis

from benchmarks.engine.client import RESULT
from benchmarks.load.run import COLLECT_JOBS, COLLECT_S, HEAD, HEAD_BYTES
from benchmarks.scheduling.messages import Template

#: Pause between two looks at the queue, in seconds.
LOOK_S = 0.05

#: Most bytes of one LPUSH, about: Redis does nothing else meanwhile.
PUSH_BYTES = 1_000_000

#: How long the process may take to fill the queue, or to say what it saw, in seconds.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """What is kept waiting."""

    url: str
    template: Template
    #: Of the jobs, in turn.
    bodies: Sequence[str]
    items_per_job: int
    #: Jobs that wait in Redis.
    depth: int


class Ended(NamedTuple):
    """A bulk job that ran."""

    #: When its result was stored, in seconds of the epoch.
    done_s: float
    items: int
    batch: str
    #: Items of its batch, and how long that was computed.
    size: int
    forward_ms: float


@dataclass(slots=True)
class Seen:
    """What became of the jobs."""

    ended: list[Ended] = field(default_factory=list)
    failed: int = 0
    #: Fewest jobs that waited in Redis.
    fewest: int = 0
    cpu_s: float = 0.0


class Bulk:
    """Keeps a queue full until it is told to stop; its process ends with this one."""

    def __init__(self, order: Order) -> None:
        """Returns when the queue is full.

        Raises:
            SystemExit: It does not become full.
        """
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_feed, args=(order, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._answer("the queue was not filled")

    def stop(self) -> Seen:
        """Stops feeding, empties the queue; returns what became of the jobs so far.

        Raises:
            SystemExit: The process does not answer.
        """
        self._pipe.send(None)
        seen: Seen = self._answer("what was fed does not say what it saw")
        self._process.join(TIMEOUT_S)
        return seen

    def kill(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._process.join()

    def _answer(self, problem: str) -> Any:
        try:
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            pass
        self.kill()
        raise SystemExit(problem)


class _Feeder:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._redis: Any = Redis.from_url(order.url)
        self._bodies = itertools.cycle(order.bodies)
        self._pending: deque[str] = deque()
        longest = max(map(len, order.bodies)) + len(order.template.text)
        self._chunk = max(1, PUSH_BYTES // longest)
        self._seen = Seen(fewest=order.depth)

    def fill(self) -> None:
        """Pushes what is missing."""
        template = self._order.template
        waiting = int(self._redis.llen(template.key))
        if self._pending:
            self._seen.fewest = min(self._seen.fewest, waiting)
        missing = self._order.depth - waiting
        while missing > 0:
            ids = [str(uuid.uuid4()) for _ in range(min(missing, self._chunk))]
            jobs = [template.copy(task_id, next(self._bodies)) for task_id in ids]
            self._redis.lpush(template.key, *jobs)
            self._pending.extend(ids)
            missing -= len(ids)

    def collect(self) -> None:
        """Reads and removes the results that are there; they come in order, nearly."""
        while self._collect_some():
            pass

    def _collect_some(self) -> bool:
        ids = [self._pending.popleft() for _ in range(min(COLLECT_JOBS, len(self._pending)))]
        with self._redis.pipeline(transaction=False) as reading:
            for task_id in ids:
                reading.getrange(f"{RESULT}{task_id}", 0, HEAD_BYTES)
            heads = reading.execute()
        both = list(zip(ids, heads, strict=True))
        self._pending.extendleft(task_id for task_id, head in reversed(both) if not head)
        done = [(task_id, head) for task_id, head in both if head]
        for _, head in done:
            self._note(head)
        if done:
            self._redis.unlink(*(f"{RESULT}{task_id}" for task_id, _ in done))
        return len(done) == COLLECT_JOBS

    def _note(self, head: bytes) -> None:
        found = HEAD.match(head)
        if found is None:
            self._seen.failed += 1
            return
        info = json.loads(found[2])
        done_s = datetime.fromisoformat(found[1].decode()).timestamp()
        items = self._order.items_per_job
        self._seen.ended.append(Ended(done_s, items, info["id"], info["size"], info["forward_ms"]))

    def end(self) -> Seen:
        """Empties the queue; returns what was seen."""
        self._redis.delete(self._order.template.key)
        self.collect()
        self._seen.cpu_s = time.process_time()
        return self._seen


def _feed(order: Order, pipe: Connection) -> None:
    """The process."""
    # Ctrl-C reaches the whole process group, but the owner decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    feeder = _Feeder(order)
    feeder.fill()
    pipe.send(None)
    look_s = time.monotonic()
    # An end of file counts as a word to stop: then nobody listens any more.
    while not pipe.poll(LOOK_S):
        feeder.fill()
        if time.monotonic() >= look_s:
            feeder.collect()
            look_s = time.monotonic() + COLLECT_S
    with suppress(BrokenPipeError):
        pipe.send(feeder.end())
