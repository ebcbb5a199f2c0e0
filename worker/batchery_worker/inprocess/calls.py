"""Calls of a batcher: what was asked, and how the answer reaches whoever waits.

A call has one item or many. Threads wait on a lock, coroutines on a future of their event loop,
and everybody else holds a `concurrent.futures.Future`.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from math import inf
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

from batchery.outcomes import Failed
from batchery_worker.inprocess.space import limited
from batchery_worker.job import USUAL_LANE, Lane

logger = logging.getLogger("batchery.inprocess")

E = TypeVar("E", bound=BaseException)

#: Attributes of objects that are not in their `__dict__`.
FIELDS = (GetSetDescriptorType, MemberDescriptorType)


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
    without it, such as pydantic's, is shared.
    """
    kind = type(error)
    args: tuple[Any, ...] = error.args
    if isinstance(error, BaseExceptionGroup):
        args = error.message, tuple(map(copy_exception, error.exceptions))
    try:
        made: E = kind.__new__(kind, *args)
    except Exception:  # noqa: BLE001 - whatever the class does
        return error
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
