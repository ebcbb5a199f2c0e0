"""The figures of the workers and queues, collected only while somebody asks for them."""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Celery

from batchery.cli.survey import Survey, WorkerDirectory, survey
from batchery.errors import StartError
from batchery_producer.gateway.monitoring.health import Health, stop
from batchery_producer.gateway.problems import REDIS_AWAY, Kind, Problem

#: Seconds between two surveys.
INTERVAL_S = 1.0

#: How long the workers may take to answer one, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: How often those who wait for a survey look whether Redis answers, in seconds.
SILENCE_CHECK_S = 0.1

#: For how long surveys go on after the last question, in seconds.
IDLE_S = 10.0

#: Surveys that are kept: figures of "now" are those of about so many seconds.
KEPT_SURVEYS = 6


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What is known at one moment.

    Attributes:
        now: The last survey; None if Redis did not answer it.
        before: One a few seconds earlier, for rates; None if there is none.
        problem: Why there is no survey; empty if there is one.
        taken_s: When it was taken, on the clock of `time.monotonic`.
    """

    now: Survey | None
    before: Survey | None
    problem: str
    taken_s: float

    @property
    def age_s(self) -> float:
        """How old it is, in seconds."""
        return time.monotonic() - self.taken_s


class Monitor:
    """Surveys workers and queues once a second, however many ask, and not at all if nobody does."""

    def __init__(self, app: Celery, queues: Collection[str], health: Health | None = None) -> None:
        """Starts nothing yet.

        Args:
            app: Its workers and its broker are asked.
            queues: Names of queues that are looked into even if no worker consumes them.
            health: Knows whether Redis answers; if it does not, nobody waits for a survey.
        """
        self._health = health
        # Of its own: threads that others share may all wait for Redis.
        self._thread = ThreadPoolExecutor(1, "batchery-monitor")
        self._app = app
        self._queues = queues
        self._directory = WorkerDirectory(app)
        self._kept: deque[Survey] = deque(maxlen=KEPT_SURVEYS)
        self._asked_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._look: ClusterSnapshot | None = None
        #: Number of surveys so far.
        self.surveys = 0

    async def latest(self) -> ClusterSnapshot:
        """The last look; the first one after a pause takes about a second, also without Redis."""
        self._asked_s = time.monotonic()
        if self._watching is None or self._watching.done():
            self._look = None
            self._first = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._watch(self._first))
            if self._health is not None:
                self._health.look_soon()
        while self._look is None and self._first is not None and not self._is_silent():
            # A caller who hangs up does not cancel it for the others.
            await asyncio.wait({self._first}, timeout=SILENCE_CHECK_S)
        if self._look is None or (self._look.now is not None and self._is_silent()):
            return ClusterSnapshot(None, None, REDIS_AWAY, time.monotonic())
        return self._look

    def _is_silent(self) -> bool:
        return self._health is not None and self._health.is_silent

    async def workers(self) -> Mapping[str, Mapping[str, Any]]:
        """What each worker says, as from `celery inspect batchery`.

        Raises:
            Problem: Redis is away.
        """
        look = await self.latest()
        if look.now is None:
            raise Problem(Kind.UNAVAILABLE, look.problem, retry_after_s=INTERVAL_S)
        return look.now.workers

    async def close(self) -> None:
        """Stops the surveys."""
        if self._watching is not None:
            await stop(self._watching)

    async def _watch(self, first: "asyncio.Future[None]") -> None:
        self._kept.clear()
        while time.monotonic() - self._asked_s < IDLE_S:
            began_s = time.monotonic()
            self._look = await self._survey()
            if not first.done():
                first.set_result(None)
            await asyncio.sleep(max(0.0, began_s + INTERVAL_S - time.monotonic()))

    async def _survey(self) -> ClusterSnapshot:
        self.surveys += 1
        try:
            ask = partial(survey, self._directory, self._app, ANSWER_TIMEOUT_S, self._queues)
            now = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
        except StartError as error:
            self._kept.clear()
            return ClusterSnapshot(None, None, str(error), time.monotonic())
        except Exception as error:  # noqa: BLE001 - whoever watches must see it, and see it mended
            return ClusterSnapshot(None, None, f"{type(error).__name__}: {error}", time.monotonic())
        before = self._kept[0] if self._kept else None
        self._kept.append(now)
        return ClusterSnapshot(now, before, "", time.monotonic())
