"""Whether Redis answers: looked at while no results come, so that no request waits to learn it."""

import asyncio
import time
from contextlib import suppress

from celery import Celery

from batchery.cli.app import check_broker
from batchery.errors import StartError
from batchery_producer.gateway.problems import Kind, Problem

#: Seconds between two looks.
INTERVAL_S = 1.0


class Health:
    """Looks whether the broker answers."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        #: Why requests are refused now; empty if they are not.
        self.problem = ""
        self._worked_s = 0.0

    def worked(self) -> None:
        """Notes that a result has come, so that for a while nobody need look."""
        self._worked_s = time.monotonic()

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
            # A look takes some milliseconds, which requests would wait for.
            if self.problem or time.monotonic() - self._worked_s > INTERVAL_S:
                await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Looks once."""
        try:
            await asyncio.to_thread(check_broker, self._app)
        except StartError as error:
            self.problem = str(error)
        else:
            self.problem = ""


async def stop(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
