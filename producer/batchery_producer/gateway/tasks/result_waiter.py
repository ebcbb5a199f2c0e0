"""Waits for results and leaves them where they are, so that several may read them."""

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import Any

from celery import Celery

from batchery.retry import Interrupted, RetryPolicy
from batchery_producer.collector import Collector, collector_for

logger = logging.getLogger(__name__)

#: How long the thread waits for results at a time, in seconds; it notices `close` that late.
WAIT_S = 0.25

#: Pause after an error, in seconds.
ERROR_PAUSE_S = 1.0


class ResultWaiter:
    """One thread waits for all jobs that coroutines of this process wait for."""

    def __init__(self, app: Celery) -> None:
        """Prepares; connects with the first wait."""
        self._app = app
        self._ended = False
        self._wake = threading.Condition()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._collector: Collector | None = None
        self._thread: threading.Thread | None = None
        self._starting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    async def headers(self) -> dict[str, Any]:
        """Headers of jobs whose end workers should announce to this process.

        Raises:
            SettingsError: The app has no result backend.
            GaveUp: Redis stays away.
        """
        async with self._starting:
            if self._collector is None:
                collector = collector_for(self._app, RetryPolicy(lambda: self._ended))
                await asyncio.to_thread(collector.expect, ())
                self._collector = collector
                self._thread = threading.Thread(target=self._collect, daemon=True)
                self._thread.start()
        return dict(self._collector.headers)

    async def wait(self, task_id: str, wait_s: float) -> bool:
        """Waits for the end of a job.

        Args:
            task_id: Its id; the job need not have been sent yet.
            wait_s: How long, in seconds.

        Returns:
            Whether it has ended.
        """
        await self.headers()
        assert self._collector is not None
        future: asyncio.Future[None] = self._loop.create_future()
        with self._wake:
            waiting = self._waiting.setdefault(task_id, [])
            waiting.append(future)
            if len(waiting) == 1:
                self._collector.expect([task_id])
            self._wake.notify_all()
        try:
            async with asyncio.timeout(wait_s):
                await future
        except TimeoutError:
            return False
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(task_id) is waiting:
                del self._waiting[task_id]
                self._collector.drop([task_id])
        return True

    def close(self) -> None:
        """Ends the thread, and stops being announced to."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _collect(self) -> None:
        assert self._collector is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._waiting)
            if self._ended:
                break
            try:
                for task_id, _ in self._collector.collect(WAIT_S):
                    with suppress(RuntimeError):  # The event loop is closed, so nobody waits.
                        self._loop.call_soon_threadsafe(self._settle, task_id)
            except Interrupted:
                continue
            except Exception as error:  # noqa: BLE001 - this thread must go on
                logger.warning("results cannot be read, trying again: %s", error)
                time.sleep(ERROR_PAUSE_S)
        self._collector.close()

    def _settle(self, task_id: str) -> None:
        for future in self._waiting.pop(task_id, ()):
            if not future.done():
                future.set_result(None)
