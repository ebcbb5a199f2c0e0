"""What a batch function may answer for one item.

A function returns one outcome per item, in order: a plain value, `Failed`, `RetryAfter`, or
Celery's `Ignore` and `Reject`. Anything that is none of the four others is a value.
"""

from dataclasses import dataclass
from math import inf

from celery.exceptions import Ignore, Reject

from batchery.errors import ItemFailed

__all__ = ["Failed", "Ignore", "Reject", "RetryAfter"]


@dataclass(frozen=True, slots=True)
class Failed:
    """This item failed; the others of its batch did not.

    Attributes:
        error: The exception that the caller's `get()` raises, or a text that becomes an
            `ItemFailed`.
        traceback: Where it was raised, as text; empty where nobody raised it.
    """

    error: BaseException | str
    traceback: str = ""

    @property
    def exception(self) -> BaseException:
        """The error as an exception, whichever way it was given."""
        return ItemFailed(self.error) if isinstance(self.error, str) else self.error


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """This item shall run again later, as Celery's `self.retry` would do it.

    Counts against the task's `max_retries`; when they are used up, the job fails with `error`, or
    with Celery's `MaxRetriesExceededError` where none is given.

    Attributes:
        seconds: Least time until the next attempt, in seconds; 0 or more.
        error: Why, for the log, the RETRY state and the final failure.
    """

    seconds: float
    error: Exception | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < inf:
            raise ValueError(f"RetryAfter({self.seconds!r}): seconds must be 0 or more, and finite")
