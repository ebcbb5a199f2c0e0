"""When Redis is away: which errors say so, and how long to wait until it is back."""

import logging
import re
import time
from collections.abc import Callable

import redis

logger = logging.getLogger("batchery.pool")

#: Errors of a Redis that answers but takes no writes for now: it is full, or a replica.
REFUSALS = (redis.OutOfMemoryError, redis.ReadOnlyError)

#: Errors that mean that no Redis answers, or that it takes no writes for now.
AWAY_ERRORS = (redis.ConnectionError, redis.TimeoutError, *REFUSALS, OSError)

#: The error of a Redis that answers but cannot write: it is full, a replica, or not ready. If the
#: command was a script's, Redis 6.2 puts other text before the word, and redis-py overlooks it.
REFUSAL = re.compile(r"(?:^|: -)(?:OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|BUSY)\b")

#: How long the completion of one job waits in total, in seconds. A shutdown may wait as long.
COMPLETION_DEADLINE_S = 30.0

#: First and longest pause between two attempts, in seconds.
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0


def is_away(error: BaseException) -> bool:
    """Whether Redis cannot be reached or cannot write; False if it refused just this command."""
    return isinstance(error, AWAY_ERRORS) or bool(REFUSAL.search(str(error)))


def pause_s(failures: int, longest_s: float = MAX_PAUSE_S) -> float:
    """Pause before the next attempt, in seconds: it doubles with each failure in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), longest_s)


class RetryDeadlineExceeded(BaseException):
    """Redis was away for too long, so the job could not be completed.

    This is not an `Exception`: Celery would store one as the failure of a job that succeeded.
    """

    def __init__(self, limit_s: float, error: object = None) -> None:
        super().__init__(f"Redis was away for {limit_s:g} s: {error}")


class RetryDeadline:
    """How long one piece of work is retried; the time counts from its first failure."""

    def __init__(
        self,
        limit_s: float = COMPLETION_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not start the time yet.

        Args:
            limit_s: Time from the first failure to the deadline, in seconds.
            clock: Monotonic time in seconds.
            sleep: Waits for a number of seconds.
        """
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._ends_s: float | None = None
        #: Whether the deadline was exceeded.
        self.is_exceeded = False

    def wait(self, failures: int, error: object) -> None:
        """Waits until the next attempt.

        Args:
            failures: How many attempts have failed in a row, 1 or more.
            error: What failed, for the log.

        Raises:
            RetryDeadlineExceeded: There is no time left for another attempt.
        """
        now_s = self._clock()
        if self._ends_s is None:
            logger.warning("Redis is away, a job's completion waits: %s", error)
            self._ends_s = now_s + self._limit_s
        pause = pause_s(failures)
        if now_s + pause > self._ends_s:
            self.is_exceeded = True
            raise RetryDeadlineExceeded(self._limit_s, error)
        self._sleep(pause)
