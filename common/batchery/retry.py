"""When Redis is away or refuses: which errors say so, and how long to try again."""

import logging
import re
import time
from collections.abc import Callable
from threading import get_ident
from typing import Self, TypeVar

import redis

from batchery.errors import BatcheryError, BrokerRefused, GaveUp

T = TypeVar("T")

#: Of the worker, whose jobs' completions wait; and of clients.
logger = logging.getLogger("batchery.pool")
client_logger = logging.getLogger(__name__)

#: Redis's words for a refusal -> their meaning, and what to do. Redis 6.2 puts other text before
#: the word if the command was a script's, and redis-py if it was a pipeline's.
REFUSAL_MEANINGS = {
    "OOM": "has no memory left; let workers empty its queues, or raise maxmemory",
    "READONLY": "is a replica; name the primary, or wait for the failover",
    "MISCONF": "cannot write to its disk; make room there",
    "MASTERDOWN": "is a replica that has lost its primary; wait for the failover",
    "BUSY": "is busy with a script that does not end; SCRIPT KILL ends it",
    "NOREPLICAS": "has too few replicas for a write",
    "NOPERM": "does not allow this user to push jobs; allow EVALSHA, and its keys",
    "WRONGTYPE": "has a value under this key that is not a queue; name another queue",
    "MOVED": "is a node of a cluster; write its URL as redis+cluster://HOST:PORT",
    "CROSSSLOT": "is a node of a cluster; write its URL as redis+cluster://HOST:PORT",
}

#: Those that concern one command; with all others, Redis takes no writes for now.
LASTING_REFUSALS = ("NOPERM", "WRONGTYPE", "MOVED", "CROSSSLOT")

#: Errors for which redis-py has a class; their text lacks the word.
REFUSAL_CLASSES: dict[type[redis.RedisError], str] = {
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.MovedError: "MOVED",
    redis.exceptions.ClusterCrossSlotError: "CROSSSLOT",
}

_REFUSAL = re.compile(rf"(?:^|: -?|caused error: )({'|'.join(REFUSAL_MEANINGS)})\b")

#: Errors of a Redis that answers but takes no writes for now.
REFUSALS: tuple[type[Exception], ...] = tuple(
    kind for kind, word in REFUSAL_CLASSES.items() if word not in LASTING_REFUSALS
)

#: Errors that mean that no Redis answers, or that it takes no writes for now.
AWAY_ERRORS: tuple[type[Exception], ...] = (
    redis.ConnectionError,
    redis.TimeoutError,
    *REFUSALS,
    OSError,
)

#: How long the completion of one job waits in total, in seconds. A shutdown may wait as long.
COMPLETION_DEADLINE_S = 30.0

#: How long Redis may be away during a run before the run gives up, in seconds: longer than a
#: restart that loads a large dataset, shorter than an outage.
AWAY_S = 120.0

#: First and longest pause between two attempts, in seconds.
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

#: Part of a caller's time limit that one command may take, and at least so many seconds. An attempt
#: that begins last still ends within the limit, and a busy Redis is not taken for one that is away.
COMMAND_SHARE = 1 / 4
MIN_COMMAND_S = 1.0

#: How long one command may take for a caller without a limit, in seconds; then Redis hangs.
MAX_COMMAND_S = 30.0

#: How often a sleeping policy asks `stop`, in seconds.
STOP_CHECK_S = 0.2


def find_refusal(error: BaseException) -> str | None:
    """The word with which Redis refuses a command; None if the error is no refusal."""
    for kind, word in REFUSAL_CLASSES.items():
        if isinstance(error, kind):
            return word
    found = _REFUSAL.search(str(error))
    return found and found[1]


def explain_refusal(error: BaseException, queue: str) -> BrokerRefused | None:
    """An error that explains why Redis takes nothing for a queue; None if it is no refusal."""
    word = find_refusal(error) if isinstance(error, redis.ResponseError) else None
    if word is None:
        return None
    return BrokerRefused(f"queue {queue!r}: Redis {REFUSAL_MEANINGS[word]} ({error})")


def is_away(error: BaseException) -> bool:
    """Whether Redis cannot be reached or cannot write; False if it refused just this command."""
    return isinstance(error, AWAY_ERRORS) or find_refusal(error) not in (None, *LASTING_REFUSALS)


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


class Interrupted(BatcheryError):
    """A run was asked to stop."""


class RetryPolicy:
    """Calls functions until they work, or for too long."""

    def __init__(
        self,
        stop: Callable[[], bool] = lambda: False,
        away_s: float = AWAY_S,
        command_s: float | None = None,
    ) -> None:
        """Prepares.

        Args:
            stop: Asked before each new attempt; True ends them.
            away_s: How long to retry, in seconds; 0 is a single attempt.
            command_s: How long one command may take, in seconds; None leaves it to the app.
        """
        self._stop = stop
        self._away_s = away_s
        self.command_s = command_s
        self._is_retrying = False
        #: Of attempts that run now, by thread.
        self._began_s: dict[int, float] = {}
        #: Whether it gave up, and nothing has worked since.
        self.is_spent = False

    @classmethod
    def within(cls, timeout_s: float | None, stop: Callable[[], bool] = lambda: False) -> Self:
        """A policy for a caller who waits so long for an answer, in seconds."""
        if timeout_s is None:
            return cls(stop, command_s=MAX_COMMAND_S)
        command_s = max(timeout_s * COMMAND_SHARE, MIN_COMMAND_S)
        away_s = max(timeout_s - command_s, timeout_s * COMMAND_SHARE)
        return cls(stop, min(away_s, AWAY_S), command_s)

    @property
    def is_away(self) -> bool:
        """Whether the last attempt failed and another one follows, or one hangs."""
        latest_s = time.monotonic() - MIN_COMMAND_S
        return self._is_retrying or any(each < latest_s for each in list(self._began_s.values()))

    def shorten(self, socket_timeout_s: float | None) -> float | None:
        """The socket timeout that an app has, or a shorter one that the policy needs."""
        known_s = [each for each in (socket_timeout_s, self.command_s) if each]
        return min(known_s, default=None)

    def call(
        self,
        function: Callable[[], T],
        errors: tuple[type[BaseException], ...],
        repair: Callable[[], None] = lambda: None,
    ) -> T:
        """Calls a function until it works.

        Args:
            function: Must be safe to repeat, whatever it did before it failed.
            errors: Errors after which to retry.
            repair: Called before each new attempt.

        Raises:
            Interrupted: `stop` returned True.
            GaveUp: It still fails. Then a call fails at its first error, until one works.
        """
        end_s, failures = time.monotonic() + (0.0 if self.is_spent else self._away_s), 0
        while True:
            self._began_s[get_ident()] = time.monotonic()
            try:
                answer = function()
            except errors as error:
                self._began_s.pop(get_ident(), None)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self.is_spent = True
                    raise GaveUp(f"retried for {self._away_s:g} s: {_reason(error)}") from error
                if not failures:
                    client_logger.warning("no usable connection (%s); retrying", _reason(error))
                self._is_retrying = True
                repair()
                failures += 1
                self.sleep(min(pause_s(failures), left_s))
            else:
                self._is_retrying = self.is_spent = False
                return answer
            finally:
                self._began_s.pop(get_ident(), None)

    def sleep(self, seconds: float) -> None:
        """Waits, and asks `stop` several times a second.

        Raises:
            Interrupted: `stop` returned True.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._stop():
                raise Interrupted("asked to stop")
            time.sleep(min(left_s, STOP_CHECK_S))


def _reason(error: BaseException) -> str:
    """The original error: kombu wraps those of Redis."""
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__
