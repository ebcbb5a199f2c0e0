"""How many items may wait: callers wait for space in the order in which they came."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


def limited(timeout_s: float) -> float:
    """A time-out, in seconds, that a lock can wait for."""
    return min(max(0.0, timeout_s), threading.TIMEOUT_MAX)


@dataclass(eq=False, slots=True)
class _Waiter:
    items: int
    #: Tells who waits that its turn has come.
    wake: Callable[[], object]
    #: Whether anybody is there to take the space.
    is_there: Callable[[], bool] = lambda: True
    has_space: bool = False


class Space:
    """Counts the items that wait; used from any thread."""

    def __init__(self, maximum: int) -> None:
        """Nothing waits.

        Args:
            maximum: Maximum number of items that wait. More go in together if nothing else waits.
        """
        self._maximum = maximum
        self._used = 0
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._is_closed = False

    def take(self, items: int) -> bool:
        """Takes space at once, or not at all."""
        with self._lock:
            return not self._waiters and self._take(items)

    def wait(self, items: int, timeout_s: float | None) -> bool:
        """Takes space as soon as there is some; False if there was none in time."""
        gate = threading.Lock()
        gate.acquire()
        waiter = _Waiter(items, gate.release)
        if not self._join(waiter):
            return True
        has_space = False
        try:
            has_space = gate.acquire(timeout=-1 if timeout_s is None else limited(timeout_s))
        finally:
            if not has_space:
                self._leave(waiter)
        return has_space

    async def wait_async(self, items: int) -> None:
        """Takes space as soon as there is some, without blocking the event loop."""
        while not await self._turn_comes(items):
            pass

    async def _turn_comes(self, items: int) -> bool:
        """Queues up and takes space; False if the event loop was not there when its turn came."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                self._leave(waiter)  # The event loop has ended.

        # An event loop that stands still may never go on, so others go first.
        waiter = _Waiter(items, wake, loop.is_running)
        if not self._join(waiter):
            return True
        try:
            await future
        except BaseException:
            self._leave(waiter)
            raise
        return waiter.has_space

    def free(self, items: int) -> None:
        """Gives space back, to those who wait for it."""
        woken = []
        with self._lock:
            self._used -= items
            while self._waiters and self._fits(self._waiters[0].items):
                waiter = self._waiters.popleft()
                waiter.has_space = waiter.is_there() and self._take(waiter.items)
                woken.append(waiter)
        for waiter in woken:
            waiter.wake()

    def close(self) -> None:
        """There is space for everybody from now on: the calls will be refused."""
        with self._lock:
            self._is_closed = True
            woken, self._waiters = self._waiters, deque()
            for waiter in woken:
                waiter.has_space = True
        for waiter in woken:
            waiter.wake()

    def _fits(self, items: int) -> bool:
        return self._is_closed or not self._used or self._used + items <= self._maximum

    def _take(self, items: int) -> bool:
        if not self._fits(items):
            return False
        self._used += items
        return True

    def _join(self, waiter: _Waiter) -> bool:
        """Queues up; False if there was space at once."""
        with self._lock:
            if not self._waiters and self._take(waiter.items):
                return False
            self._waiters.append(waiter)
            return True

    def _leave(self, waiter: _Waiter) -> None:
        """Gives up: the space too, if it was given in the meantime."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
            had_space, waiter.has_space = waiter.has_space, False
        if had_space:
            self.free(waiter.items)
