"""What workers say of their devices, asked seldom, for the answers that tell of them."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.cli.survey import WorkerDirectory
from batchery_producer.gateway.problems import Kind, Problem

#: How long answers of workers are collected, in seconds.
TIMEOUT_S = 1.0

#: How long an answer is good, in seconds.
MAX_AGE_S = 5.0

#: Bytes of what the seed calls a GB, as torch's users count.
GB = 2**30


class DeviceFigures(NamedTuple):
    """The devices that serve a queue.

    Attributes:
        names: Of those that are ready, each once, sorted.
        allocated_bytes: Memory that tensors hold on all of them; None if no device counts it, as
            on a CPU.
        peak_bytes: Maximum that they held.
    """

    names: tuple[str, ...] = ()
    allocated_bytes: int | None = None
    peak_bytes: int | None = None


def figures_of(workers: Mapping[str, Mapping[str, Any]], queue: str) -> DeviceFigures:
    """Reads the figures of all workers.

    Args:
        workers: By name, as from `celery inspect batchery`.
        queue: Workers that do not consume it are left out.
    """
    ready = [
        (name, device)
        for worker in workers.values()
        if queue in worker.get("queues", ())
        for name, device in worker.get("devices", {}).items()
        if device.get("state") == "ready"
    ]
    memory = [device["memory"] for _, device in ready if device.get("memory")]
    return DeviceFigures(
        tuple(sorted({name for name, _ in ready})),
        sum(each["allocated_bytes"] for each in memory) if memory else None,
        sum(each["peak_bytes"] for each in memory) if memory else None,
    )


def in_gb(size_bytes: int | None) -> float | None:
    """A size in GB; None for none."""
    return None if size_bytes is None else round(size_bytes / GB, 3)


class DeviceLook:
    """Asks the workers when somebody wants to know and the last answer is old."""

    def __init__(self, app: Celery) -> None:
        self._directory = WorkerDirectory(app)
        self._asking = asyncio.Lock()
        self._asked_s: float | None = None
        self._workers: Mapping[str, Mapping[str, Any]] = {}

    async def figures(self, queue: str) -> DeviceFigures:
        """The devices that serve a queue; a few seconds old.

        Raises:
            Problem: Redis is away.
        """
        async with self._asking:
            now_s = time.monotonic()
            if self._asked_s is None or now_s - self._asked_s > MAX_AGE_S:
                try:
                    self._workers = await asyncio.to_thread(self._directory.ask, TIMEOUT_S)
                except (OperationalError, RedisError, OSError) as error:
                    raise Problem(
                        Kind.UNAVAILABLE, f"no Redis: {error}", retry_after_s=TIMEOUT_S
                    ) from error
                self._asked_s = time.monotonic()
        return figures_of(self._workers, queue)
