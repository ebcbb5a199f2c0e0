"""Calls of a batcher: what was asked, and how the answer reaches whoever waits."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from batchery.outcomes import Failed
from batchery.tracebacks import copy_exception
from batchery_worker.inprocess.options import CallOptions
from batchery_worker.job import Lane

logger = logging.getLogger("batchery.inprocess")


@dataclass(eq=False, slots=True)
class Call:
    """One call and its outcomes; each item is answered once, by the batcher's thread."""

    items: Sequence[Any]
    #: Whether the caller gave a list, and gets one.
    many: bool
    #: Whether the thread that called waits for the answer.
    is_blocking: bool
    #: Once it is cancelled, nobody waits any more: what has not begun is dropped.
    future: "Future[Any] | asyncio.Future[None]"
    #: The object whose method is called; it lives as long as the call.
    owner: Any
    keywords: Mapping[str, Any]
    #: Equal for equal keywords.
    key: str
    lane: Lane
    options: CallOptions
    #: The number of tokens of each item; None where they are not counted.
    lengths: Sequence[int] | None = None
    sent_s: float = 0.0
    outcomes: list[Any] = field(init=False)
    #: How many items are not answered yet.
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.items)
        self.outcomes = [None] * self.left

    def answer(self, index: int, outcome: Any) -> bool:
        """Notes the outcome of an item; returns whether it was the last one."""
        self.outcomes[index] = outcome
        self.left -= 1
        return not self.left

    def fail(self, error: BaseException) -> None:
        """Fails every item, and tells the caller."""
        self.outcomes = [Failed(error) for _ in self.items]
        self.left = 0
        settle([self])

    def result(self) -> Any:
        """The value, or the list of values.

        Raises:
            BaseException: That of the first item that failed, unless exceptions are returned.
        """
        if not self.many:
            return _value(self.outcomes[0])
        if self.options.return_exceptions:
            return [
                copy_exception(each.exception) if isinstance(each, Failed) else each
                for each in self.outcomes
            ]
        return list(map(_value, self.outcomes))


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Failed):
        raise copy_exception(outcome.exception)
    return outcome


def settle(calls: Iterable[Call]) -> None:
    """Tells callers that all their items are answered; from any thread.

    The coroutines of an event loop are told in one turn of it, as each turn costs a system call,
    and ask for the result themselves.
    """
    by_loop = defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]](list)
    for call in calls:
        if isinstance(call.future, Future):
            _set_result(call, call.future)
        else:
            by_loop[call.future.get_loop()].append(call.future)
    for loop, futures in by_loop.items():
        with suppress(RuntimeError):  # The loop has ended, and whoever waited with it.
            loop.call_soon_threadsafe(_wake, futures)


def _set_result(call: Call, future: "Future[Any]") -> None:
    try:
        try:
            value = call.result()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever holds the future
            future.set_exception(error)
        else:
            future.set_result(value)
    except InvalidStateError:
        # It was cancelled. Only this tells those who wait for several futures.
        future.set_running_or_notify_cancel()
    except BaseException:
        # Futures log and drop what else their callbacks raise; other callers must not suffer.
        logger.exception("a callback of a future raised")


def _wake(futures: "Iterable[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
