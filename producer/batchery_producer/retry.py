"""Retries while a broker or a result backend is away."""

import logging
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from kombu.utils.functional import retry_over_time

from batchery.errors import BatcheryError

T = TypeVar("T")

# Its published types have another signature for `errback` than its documentation.
_retry_over_time: Callable[..., Any] = retry_over_time

logger = logging.getLogger(__name__)

#: How long Redis may be away during a run before the run gives up, in seconds: longer than a
#: restart that loads a large dataset, shorter than an outage.
AWAY_S = 120.0

#: Pauses between attempts, in seconds; they grow from the first to the maximum.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0

#: Part of a caller's time limit that one command may take, and at least so many seconds. An attempt
#: that begins last still ends within the limit, and a busy Redis is not taken for one that is away.
COMMAND_SHARE = 1 / 4
MIN_COMMAND_S = 1.0

#: How often a sleeping policy asks `stop`, in seconds.
STOP_CHECK_S = 0.2


class GaveUp(BatcheryError):
    """Redis stays away, so jobs cannot be sent or their results cannot be read."""


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
        self._attempt_began_s: float | None = None
        #: Whether it gave up.
        self.is_spent = False

    @classmethod
    def within(cls, timeout_s: float | None) -> Self:
        """A policy for a caller who waits so long for an answer, in seconds."""
        if timeout_s is None:
            return cls()
        command_s = max(timeout_s * COMMAND_SHARE, MIN_COMMAND_S)
        away_s = max(timeout_s - command_s, timeout_s * COMMAND_SHARE)
        return cls(away_s=min(away_s, AWAY_S), command_s=command_s)

    @property
    def is_away(self) -> bool:
        """Whether the last attempt failed and another one follows, or one hangs."""
        began_s = self._attempt_began_s
        return self._is_retrying or (
            began_s is not None and time.monotonic() - began_s > MIN_COMMAND_S
        )

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
            GaveUp: It still fails. From then on, a call fails at its first error.
        """

        def attempt() -> T:
            self._attempt_began_s = time.monotonic()
            try:
                return function()
            finally:
                self._attempt_began_s = None

        def between_attempts(error: BaseException, pauses_s: Any, number: int) -> float:
            if number == 0:
                logger.warning("no usable connection (%s); retrying", _reason(error))
            self._is_retrying = True
            repair()
            return float(min(next(pauses_s), max(end_s - time.monotonic(), 0)))

        end_s = time.monotonic() + self._away_s
        is_last = self.is_spent or not self._away_s
        try:
            answer: T = _retry_over_time(
                attempt,
                errors,
                errback=between_attempts,
                callback=self._check,
                interval_start=FIRST_PAUSE_S,
                interval_step=FIRST_PAUSE_S,
                interval_max=MAX_PAUSE_S,
                timeout=self._away_s,
                max_retries=0 if is_last else None,
            )
        except errors as error:
            self.is_spent = True
            raise GaveUp(f"retried for {self._away_s:g} s: {_reason(error)}") from error
        self._is_retrying = False
        return answer

    def sleep(self, seconds: float) -> None:
        """Waits, and asks `stop` several times a second.

        Raises:
            Interrupted: `stop` returned True.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, STOP_CHECK_S))

    def _check(self) -> None:
        if self._stop():
            raise Interrupted("asked to stop")


def _reason(error: BaseException) -> str:
    """The original error: kombu wraps those of Redis."""
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__
