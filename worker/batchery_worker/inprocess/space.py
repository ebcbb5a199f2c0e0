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
    #: Tells who waits that there is space; False if nobody is there to take it.
    wake: Callable[[], bool]


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

        def wake() -> bool:
            gate.release()
            return True

        waiter = self._join(items, wake)
        if waiter is None:
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
        future: asyncio.Future[bool] = loop.create_future()

        def settle(has_space: bool) -> None:
            if not future.done():
                future.set_result(has_space)

        def wake() -> bool:
            has_space = loop.is_running()
            try:
                loop.call_soon_threadsafe(settle, has_space)
            except RuntimeError:
                return False  # It is closed.
            # One that stands still may never go on, so others go first.
            return has_space

        waiter = self._join(items, wake)
        if waiter is None:
            return True
        try:
            return await future
        except BaseException:
            if not future.done() or future.cancelled() or future.result():
                self._leave(waiter)
            raise

    def free(self, items: int) -> None:
        """Gives space back, to those who wait for it."""
        while items:
            woken = []
            with self._lock:
                self._used -= items
                while self._waiters and self._take(self._waiters[0].items):
                    woken.append(self._waiters.popleft())
            items = sum([each.items for each in woken if not each.wake()])

    def close(self) -> None:
        """There is space for everybody from now on: the calls will be refused."""
        with self._lock:
            self._is_closed = True
            woken, self._waiters = self._waiters, deque()
        for waiter in woken:
            waiter.wake()

    def _take(self, items: int) -> bool:
        if self._is_closed:
            return True
        if self._used and self._used + items > self._maximum:
            return False
        self._used += items
        return True

    def _join(self, items: int, wake: Callable[[], bool]) -> _Waiter | None:
        """Queues up; None if there was space at once."""
        with self._lock:
            if not self._waiters and self._take(items):
                return None
            waiter = _Waiter(items, wake)
            self._waiters.append(waiter)
            return waiter

    def _leave(self, waiter: _Waiter) -> None:
        """Gives up: the space too, if it was given in the meantime."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        self.free(waiter.items)
