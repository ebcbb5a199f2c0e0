"""Patience: tries again while a broker or a result backend is away."""

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

#: How long Redis may stay away during a run before it is given up, in seconds: a restart that reads
#: a large dataset back fits, an outage does not.
AWAY_S = 120.0

#: Pauses between attempts, in seconds; they grow from the first to the longest.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0

#: How late `stop` is noticed at most, in seconds.
LOOK_S = 0.2


class GaveUp(BatcheryError):
    """A run ends before its jobs do: nothing comes any more."""


class Interrupted(BatcheryError):
    """A run was asked to stop."""


class Patience:
    """Calls things until they work."""

    def __init__(self, stop: Callable[[], bool] = lambda: False, away_s: float = AWAY_S) -> None:
        """Prepares.

        Args:
            stop: Asked before each new attempt; True ends them.
            away_s: How long to go on, in seconds.
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
            function: May be repeated after a failure, whatever it had done before it.
            errors: What is worth another attempt.
            repair: Called before each new attempt.

        Raises:
            Interrupted: `stop` said so.
            GaveUp: It still does not work. Whoever calls then is refused at its first failure.
        """

        def between_attempts(error: BaseException, pauses_s: Any, attempt: int) -> float:
            if attempt == 0:
                logger.warning("no connection, or none of use (%s); trying again", _reason(error))
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
                interval_max=LONGEST_PAUSE_S,
                timeout=self._away_s,
                max_retries=0 if self._is_spent else None,
            )
        except errors as error:
            self._is_spent = True
            raise GaveUp(f"tried for {self._away_s:g} s: {_reason(error)}") from error
        return answer

    def sleep(self, seconds: float) -> None:
        """Waits; several times a second it asks whether to go on.

        Raises:
            Interrupted: `stop` said so.
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, LOOK_S))

    def _check(self) -> None:
        if self._stop():
            raise Interrupted("asked to stop")


def _reason(error: BaseException) -> str:
    """What was wrong in the first place: kombu wraps what Redis has said."""
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__
