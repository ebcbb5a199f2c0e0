"""Where a trace is played: a worker that sleeps, or one that embeds texts, each with its Redis."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from redis import Redis

from batchery_worker.simulator.workload import Arrival
from benchmarks.engine.target import target_for
from benchmarks.engine.texts import lengths_of, read_texts
from benchmarks.scheduling.messages import Template, body_of
from benchmarks.scheduling.playing import Call
from benchmarks.scheduling.side import QUEUE, WORKLOAD, started, stats_of
from benchmarks.scheduling.sleeper import BATCH_SIZE, Sleeper
from benchmarks.scheduling.sleeper import QUEUE as SLEEP_QUEUE

#: Priority of each class, as a worker has them by default.
PRIORITIES = {"high": 0, "normal": 3, "low": 6}

#: Task of the worker that sleeps, and what its items are: it does not matter.
SLEEP_TASK, SLEEP_ITEM = "sleep", "any"

#: Different texts that are embedded.
TEXTS = 2048


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that plays traces of one task."""

    url: str
    app: Celery
    task: str
    templates: Mapping[str, Template]
    #: Of the jobs, in turn.
    bodies: Sequence[str]
    max_batch_size: int
    devices: int
    #: Of each body's text; of other items nobody counts any.
    tokens: Sequence[int] = (0,)

    def calls(self, trace: Sequence[Arrival]) -> list[Call]:
        """The jobs of a trace, as they are sent."""
        return [
            Call(
                each.time_s,
                each.lane.priority_class,
                self.templates[each.lane.priority_class],
                self.bodies[number % len(self.bodies)],
                self.tokens[number % len(self.tokens)],
            )
            for number, each in enumerate(trace)
        ]

    def costs(self) -> Mapping[str, Any] | None:
        """What the worker has learned of its batches, as `batchery stats` shows; None before."""
        costs: Mapping[str, Any] | None = stats_of(self.app)["pool"]["costs"].get(self.task)
        return costs

    def redis_server(self) -> str:
        """Version of the server."""
        with Redis.from_url(self.url) as redis:
            about: Any = redis.info("server")
        return str(about["redis_version"])


def _templates(message: bytes, task: str, queue: str) -> dict[str, Template]:
    return {
        name: Template.of(message, task, queue, priority) for name, priority in PRIORITIES.items()
    }


@contextlib.contextmanager
def sleeping(pass_ms: float, item_ms: float, devices: int) -> Iterator[Place]:
    """A worker whose batches take so much, and so much for each item; it ends with the block."""
    worker = Sleeper(pass_ms / 1e3, item_ms / 1e3, devices)
    app = Celery("client", broker=worker.url, backend=worker.url, set_as_current=False)
    try:
        yield Place(
            worker.url,
            app,
            SLEEP_TASK,
            _templates(worker.message, SLEEP_TASK, SLEEP_QUEUE),
            [body_of(SLEEP_ITEM)],
            BATCH_SIZE,
            devices,
        )
    finally:
        app.close()
        worker.stop()


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Lets later workers know nothing of a model."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def embedding(options: argparse.Namespace) -> Iterator[Place]:
    """A worker with a model, and texts of log-normal length; it ends with the block.

    Args:
        options: As for `target_for`.
    """
    with _environment_kept(), target_for(options) as target, started(None, target) as system:
        system.wait_ready()
        texts = read_texts(WORKLOAD, TEXTS, target.folder)
        yield Place(
            system.url,
            system.app,
            QUEUE,
            _templates(system.message(), QUEUE, QUEUE),
            [body_of(text) for text in texts],
            target.batch_size,
            1,
            lengths_of(texts, target.folder),
        )
