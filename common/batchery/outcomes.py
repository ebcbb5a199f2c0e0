"""What a batch function may answer for one item.

A function returns one outcome per item, in order: a plain value, `Failed`, `RetryAfter`, `Replace`,
or Celery's `Ignore` and `Reject`. Anything else is a value. A function that is a generator may also
yield a `Partial` at any time, which is no outcome.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, SupportsIndex

from batchery.errors import ItemFailed
from batchery.tracebacks import Frame

if TYPE_CHECKING:
    from celery.canvas import Signature
    from celery.exceptions import Ignore, Reject

__all__ = ["Failed", "Ignore", "Partial", "Reject", "Replace", "RetryAfter"]


@dataclass(frozen=True, slots=True)
class Failed:
    """This item failed; the others of its batch did not.

    Attributes:
        error: The exception that the caller's `get()` raises; or a text, which becomes an
            `ItemFailed`. Of a class an instance is made, as `raise` does.
        traceback: Where it was raised, as text; empty if it was not raised.
        frames: The same for programs, see `tracebacks.py`.
    """

    error: BaseException | str
    traceback: str = ""
    frames: tuple[Frame, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.error, str):
            object.__setattr__(self, "error", _instance(self, self.error, BaseException))

    @property
    def exception(self) -> BaseException:
        """The error as an exception, even if it was given as a text."""
        return ItemFailed(self.error) if isinstance(self.error, str) else self.error


@dataclass(frozen=True, slots=True)
class Partial:
    """A piece of the result of one item, for those who read its stream; nobody else pays for it.

    Attributes:
        index: Index of the item in the list that the function was given.
        piece: What JSON can write.
    """

    index: SupportsIndex
    piece: Any


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """This item must run again later, as after Celery's `self.retry`.

    It counts against the task's `max_retries`. When they are used up, the job fails with `error`,
    or with Celery's `MaxRetriesExceededError` if there is no `error`.

    Attributes:
        seconds: Minimum time until the next attempt, in seconds; 0 or more.
        error: The reason, for the log, the RETRY state and the final failure: an exception, or a
            text, which becomes an `ItemFailed`.
    """

    seconds: float
    error: Exception | str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < inf:
            raise ValueError(f"RetryAfter({self.seconds!r}): seconds must be 0 or more, and finite")
        if self.error is not None and not isinstance(self.error, str):
            object.__setattr__(self, "error", _instance(self, self.error, Exception))

    @property
    def exception(self) -> Exception | None:
        """The error as an exception, even if it was given as a text; None if there is none."""
        return ItemFailed(self.error) if isinstance(self.error, str) else self.error


@dataclass(frozen=True, slots=True)
class Replace:
    """Another job replaces this one, as after Celery's `self.replace`.

    The new job keeps the id, so that the caller waits for it. It also keeps the callbacks, and the
    place in a chain, a group or a chord.

    Attributes:
        signature: What to run instead: `other.s(item)`, a chain, a group or a chord.
    """

    signature: "Signature[Any]"

    def __post_init__(self) -> None:
        from celery.canvas import Signature

        if not isinstance(self.signature, Signature):
            raise TypeError(
                f"Replace({self.signature!r:.80}): give task.s(...), a chain or a group"
            )


def _instance(outcome: Failed | RetryAfter, error: Any, kind: type[BaseException]) -> Any:
    """The exception that an outcome was given, or an instance of the class that it was given."""
    if isinstance(error, type) and issubclass(error, kind):
        error = error()
    if not isinstance(error, kind):
        raise TypeError(
            f"{type(outcome).__name__}(error={error!r:.80}): give an exception or a text"
        )
    return error


class Answered(Exception):
    """Carries the outcome of one item out of `self.retry` and `self.replace`, which must raise."""

    def __init__(self, outcome: RetryAfter | Replace) -> None:
        super().__init__(f"the outcome of one item, not an error: {outcome!r:.200}")
        self.outcome = outcome


def collect_outcomes(generator: Iterator[Any], take: Callable[[Any], bool]) -> Any:
    """Runs a generator; its outcomes are what it yields and nobody takes, or else its return."""
    outcomes: list[Any] = []
    while True:
        try:
            each = next(generator)
        except StopIteration as end:
            return outcomes if outcomes or end.value is None else end.value
        if not take(each):
            outcomes.append(each)


def __getattr__(name: str) -> Any:
    # A program without tasks uses the other outcomes, and loads no Celery for these two.
    if name not in ("Ignore", "Reject"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from celery import exceptions

    return getattr(exceptions, name)
