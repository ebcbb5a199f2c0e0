"""Whether Redis answers, and who consumes its queues: looked at beside the requests."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.cli.app import check_broker
from batchery.cli.redis_check import TIMEOUT_S
from batchery.errors import StartError
from batchery.transport.live_workers import LiveWorkers
from batchery_producer.gateway.monitoring.absence import Absence
from batchery_producer.gateway.problems import REDIS_AWAY, Kind, Problem

logger = logging.getLogger("uvicorn.error")

#: Seconds between two looks.
INTERVAL_S = 1.0

#: A look that takes longer, in seconds, is reported as a Redis that does not answer. Requests go on
#: until it has failed, as a busy Redis may take so long.
SLOW_S = 1.0


class Health:
    """Looks whether the broker answers, and which of its queues have workers."""

    def __init__(self, app: Celery, absence: Absence) -> None:
        self._app = app
        self._absence = absence
        #: Why requests are refused now; empty if they are not. Names no address and no user.
        self.problem = ""
        self._began_s: float | None = None
        self._is_wanted = asyncio.Event()
        self._workers: LiveWorkers | None = None
        # Of its own: threads that others share may all wait for Redis.
        self._thread = ThreadPoolExecutor(1, "batchery-health")

    @property
    def is_silent(self) -> bool:
        """Whether Redis does not answer, as far as is known at this moment."""
        began_s = self._began_s
        return bool(self.problem) or (began_s is not None and time.monotonic() - began_s > SLOW_S)

    def check(self) -> None:
        """Makes sure that jobs can be sent.

        Raises:
            Problem: They cannot.
        """
        if self.problem:
            raise Problem(Kind.UNAVAILABLE, self.problem, retry_after_s=INTERVAL_S)

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            self._is_wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._is_wanted.wait()

    def look_soon(self) -> None:
        """Looks once more, at once: somebody waits."""
        self._is_wanted.set()

    async def look(self) -> None:
        """Looks once."""
        self._began_s = time.monotonic()
        try:
            absent = await asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        except (StartError, OperationalError, RedisError, OSError) as error:
            if not self.problem:
                logger.warning("%s: %s", REDIS_AWAY, error)
            self.problem = REDIS_AWAY
            self._absence.forget(time.monotonic())
        else:
            self.problem = ""
            self._absence.refuse(absent)
        finally:
            self._began_s = None

    def _look(self) -> set[str]:
        """Returns the queues that nobody consumes."""
        if self._workers is None:
            check_broker(self._app)
            with self._app.connection_for_read() as connection:
                self._workers = LiveWorkers.of(connection, TIMEOUT_S)
            if self._workers is None:
                return set()  # Other brokers do not say who consumes.
        alone = self._absence.without_worker(self._workers.registered(), time.monotonic())
        return set() if alone and self._workers.may_be_others() else alone


async def stop(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
