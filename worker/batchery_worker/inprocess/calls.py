"""Calls of a batcher: what was asked, and how the answer reaches whoever waits.

A call has one item or many. Threads wait on a lock, coroutines on a future of their event loop,
and everybody else holds a `concurrent.futures.Future`.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

from batchery.outcomes import Failed
from batchery_worker.job import USUAL_LANE, Lane

logger = logging.getLogger("batchery.inprocess")

E = TypeVar("E", bound=BaseException)

#: Attributes of objects that are not in their `__dict__`.
FIELDS = (GetSetDescriptorType, MemberDescriptorType)


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
            had_space, waiter.has_space = waiter.has_space, False
        # Those behind it may fit, though it did not.
        self.free(waiter.items if had_space else 0)


class Call:
    """One call and its outcomes; each item is answered once, by the batcher's thread."""

    __slots__ = (
        "deadline_s",
        "is_abandoned",
        "items",
        "key",
        "keys",
        "keywords",
        "lane",
        "left",
        "lengths",
        "many",
        "outcomes",
        "owner",
        "returns_exceptions",
        "sent_s",
    )

    def __init__(
        self,
        items: Sequence[Any],
        many: bool,
        owner: Any = None,
        keywords: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> None:
        """Nothing is answered yet.

        Args:
            items: At least one.
            many: Whether the caller gave a list, and gets one.
            owner: The object whose method is called; it lives as long as the call.
            keywords: For the function.
            key: Equal for equal keywords.
        """
        self.items = items
        self.many = many
        self.owner = owner
        self.keywords = keywords or {}
        self.key = key
        self.outcomes: list[Any] = [None] * len(items)
        self.left = len(items)
        #: Whether nobody waits any more; what has not begun is dropped.
        self.is_abandoned = False
        self.lane: Lane = USUAL_LANE
        #: In how many seconds it should be answered.
        self.deadline_s = inf
        #: The number of tokens of each item; None where they are not counted.
        self.lengths: Sequence[int] | None = None
        #: Where items have keys, too: that of each, or None for an item that was refused.
        self.keys: Sequence[str | None] | None = None
        self.returns_exceptions = False
        self.sent_s = 0.0

    def answer(self, index: int, outcome: Any) -> bool:
        """Notes the outcome of an item; returns whether it was the last one."""
        self.outcomes[index] = outcome
        self.left -= 1
        return not self.left

    def fail(self, error: BaseException) -> None:
        """Fails every item, and tells the caller."""
        self.outcomes = [Failed(error) for _ in self.items]
        self.left = 0
        self.finish()

    def finish(self) -> None:
        """Tells the caller that all items are answered; from any thread."""
        raise NotImplementedError

    def result(self) -> Any:
        """The value, or the list of values.

        Raises:
            BaseException: That of the first item that failed, unless exceptions are returned.
        """
        if not self.many:
            return _value(self.outcomes[0])
        if self.returns_exceptions:
            return [
                copy_exception(each.exception) if isinstance(each, Failed) else each
                for each in self.outcomes
            ]
        return [_value(each) for each in self.outcomes]


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Failed):
        raise copy_exception(outcome.exception)
    return outcome


def copy_exception(error: E) -> E:
    """An exception for one caller alone: one object raised in all would grow all their tracebacks.

    Its `__init__` is not called, as that may take other arguments than `args`. What cannot be made
    without it, such as pydantic's, is shared, and so is what refuses attributes.
    """
    try:
        return _copy(error)
    except Exception:  # noqa: BLE001 - whatever the class does
        return error


def _copy(error: E) -> E:
    kind = type(error)
    args: tuple[Any, ...] = error.args
    if isinstance(error, BaseExceptionGroup):
        args = error.message, tuple(map(copy_exception, error.exceptions))
    made: E = kind.__new__(kind, *args)
    vars(made).update(vars(error))
    # Slots, the fields of Python's own classes such as `OSError.filename`, cause and traceback.
    for base in kind.__mro__:
        for name, field in vars(base).items():
            if name == "__dict__" or not isinstance(field, FIELDS):
                continue
            with suppress(AttributeError, TypeError):  # Never set, or only to be read.
                value = getattr(error, name)
                # `OSError` writes a None that was set otherwise than nothing.
                if getattr(made, name, None) is not value:
                    setattr(made, name, value)
    made.args = args
    # Setting the cause has set this, too.
    made.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        made.__notes__ = list(error.__notes__)
    return made


class ThreadCall(Call):
    """A thread waits."""

    __slots__ = ("_done",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self) -> None:
        """Wakes the thread; from any other."""
        self._done.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the answer; False if it has not come in time."""
        return self._done.acquire(timeout=-1 if timeout_s is None else limited(timeout_s))


class FutureCall(Call):
    """Somebody holds a future, and may cancel it."""

    __slots__ = ("future",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.future: Future[Any] = Future()
        self.future.add_done_callback(self._abandon_if_cancelled)

    def _abandon_if_cancelled(self, future: "Future[Any]") -> None:
        if future.cancelled():
            self.is_abandoned = True
            # Only this tells those who wait for several futures.
            future.set_running_or_notify_cancel()

    def finish(self) -> None:
        """Sets the result; from any thread."""
        try:
            try:
                value = self.result()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever holds the future
                self.future.set_exception(error)
            else:
                self.future.set_result(value)
        except InvalidStateError:
            pass  # Cancelled while it ran.
        except BaseException:
            # Futures log and drop what else their callbacks raise; other callers must not suffer.
            logger.exception("a callback of a future raised")


class LoopCall(Call):
    """A coroutine waits, on its own event loop."""

    __slots__ = ("_future", "loop")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self.loop.create_future()

    def finish(self) -> None:
        """Wakes the coroutine; from any thread."""
        notify(self.loop, [self])

    def settle(self) -> None:
        """Wakes the coroutine; on its loop."""
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Waits for the answer."""
        await self._future


def notify(loop: asyncio.AbstractEventLoop, calls: Iterable[LoopCall]) -> None:
    """Wakes the coroutines of one event loop, in one turn."""

    def settle() -> None:
        for call in calls:
            call.settle()

    with suppress(RuntimeError):  # The loop has ended, and whoever waited with it.
        loop.call_soon_threadsafe(settle)
