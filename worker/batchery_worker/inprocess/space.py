"""How many items may wait: callers wait for space in the order in which they came."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Waiter:
    items: int
    wake: Callable[[], object]


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

    def take(self, items: int) -> bool:
        """Takes space at once, or not at all."""
        with self._lock:
            return not self._waiters and self._take(items)

    def wait(self, items: int, timeout_s: float | None) -> bool:
        """Takes space as soon as there is some; False if there was none in time."""
        gate = threading.Lock()
        gate.acquire()
        waiter = self._join(items, gate.release)
        if waiter is None:
            return True
        has_space = False
        try:
            has_space = gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            if not has_space:
                self._leave(waiter)
        return has_space

    async def wait_async(self, items: int) -> None:
        """Takes space as soon as there is some, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                self.free(items)  # The event loop has ended.

        waiter = self._join(items, wake)
        if waiter is None:
            return
        try:
            await future
        except BaseException:
            self._leave(waiter)
            raise

    def free(self, items: int) -> None:
        """Gives space back, to those who wait for it."""
        woken = []
        with self._lock:
            self._used -= items
            while self._waiters and self._take(self._waiters[0].items):
                woken.append(self._waiters.popleft())
        for waiter in woken:
            waiter.wake()

    def _take(self, items: int) -> bool:
        if self._used and self._used + items > self._maximum:
            return False
        self._used += items
        return True

    def _join(self, items: int, wake: Callable[[], object]) -> _Waiter | None:
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
