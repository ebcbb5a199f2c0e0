"""Soft time limits and coroutines, on the main thread of a device process."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded


@contextmanager
def soft_time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `SoftTimeLimitExceeded` in the block after so many seconds; None for no limit.

    Only for the main thread: signals are handled nowhere else.
    """
    if seconds is None:
        yield
        return

    def expire(*_: object) -> None:
        raise SoftTimeLimitExceeded(seconds)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class EventLoop:
    """Runs the coroutines of `async def` tasks on one loop, where their connections live on."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end.

        Raises:
            SoftTimeLimitExceeded: The limit was reached; the loop and what else ran on it is gone.
        """
        try:
            return self._runner.run(coroutine)
        except SoftTimeLimitExceeded:
            # The exception came out of the middle of the loop, whose tasks would go on next time.
            self._runner.close()
            self._runner = asyncio.Runner()
            raise
