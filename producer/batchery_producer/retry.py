"""Retries while a broker or a result backend is away."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

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

#: How often a sleeping policy asks `stop`, in seconds.
STOP_CHECK_S = 0.2


class GaveUp(BatcheryError):
    """A run ends before its jobs do, because no results come or Redis stays away."""


class Interrupted(BatcheryError):
    """A run was asked to stop."""


class RetryPolicy:
    """Calls functions until they work, or for too long."""

    def __init__(self, stop: Callable[[], bool] = lambda: False, away_s: float = AWAY_S) -> None:
        """Prepares.

        Args:
            stop: Asked before each new attempt; True ends them.
            away_s: How long to retry, in seconds.
        """
        self._stop = stop
        self._away_s = away_s
        self._is_spent = False

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

        def between_attempts(error: BaseException, pauses_s: Any, attempt: int) -> float:
            if attempt == 0:
                logger.warning("no usable connection (%s); retrying", _reason(error))
            repair()
            return float(next(pauses_s))

        try:
            answer: T = _retry_over_time(
                function,
                errors,
                errback=between_attempts,
                callback=self._check,
                interval_start=FIRST_PAUSE_S,
                interval_step=FIRST_PAUSE_S,
                interval_max=MAX_PAUSE_S,
                timeout=self._away_s,
                max_retries=0 if self._is_spent else None,
            )
        except errors as error:
            self._is_spent = True
            raise GaveUp(f"retried for {self._away_s:g} s: {_reason(error)}") from error
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
