"""What happens to a job's completion while Redis is away: it waits, and then the job is given back.

Celery tries a result once, a callback for half a second, and a chord's join once. Then it stores
a failure for a job that succeeded, or acknowledges one whose caller waits for ever.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import redis
from celery import Celery
from celery._state import get_current_task
from celery.app import amqp
from celery.backends.redis import RedisBackend
from kombu.exceptions import OperationalError
from redis.backoff import AbstractBackoff, NoBackoff
from redis.retry import Retry

logger = logging.getLogger("batchery.pool")

#: How often a result is tried again. Celery's pauses between them grow to ten seconds, half of it
#: on average: about half a minute together, as long as a shutdown may have to wait.
STORE_RETRIES = 15

#: How long the completion of one job waits in all, in seconds; as long as for its result.
PATIENCE_S = 30.0

#: First and longest pause between two attempts, in seconds.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

#: Errors of a Redis that is there and takes no results for now: it is full, or only a replica.
REFUSALS = (redis.OutOfMemoryError, redis.ReadOnlyError)
AWAY = (redis.ConnectionError, redis.TimeoutError, *REFUSALS)


class RanOut(BaseException):
    """Redis was away for too long: nothing is known of the job's end but that it has not come.

    No `Exception`: as one, Celery would store it as the failure of a job that succeeded.
    """

    def __init__(self, limit_s: float, error: object = None) -> None:
        super().__init__(f"Redis was away for {limit_s:g} s: {error}")


class Patience:
    """Of the completion of one job, with whatever it does in Redis."""

    def __init__(
        self,
        limit_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begins when something fails.

        Args:
            limit_s: How long it lasts from then on, in seconds.
            clock: Monotonic, in seconds.
            sleep: Waits for so many seconds.
        """
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._ends_s: float | None = None
        #: Whether it did not suffice.
        self.ran_out = False

    def wait(self, failures: int, error: object) -> None:
        """Waits until the next attempt.

        Args:
            failures: How many there have been in a row, 1 or more.
            error: What failed, for the log.

        Raises:
            RanOut: There is no time left for another attempt.
        """
        now_s = self._clock()
        if self._ends_s is None:
            logger.warning("Redis is away, a job's completion waits: %s", error)
            self._ends_s = now_s + self._limit_s
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)
        if now_s + pause_s > self._ends_s:
            self.ran_out = True
            raise RanOut(self._limit_s, error)
        self._sleep(pause_s)


_patience: ContextVar[Patience | None] = ContextVar("batchery_patience", default=None)

#: Celery's own: set while its tracer publishes callbacks and the next step of a chain.
_follows_a_job: ContextVar[bool] = getattr(
    amqp, "_callback_publish_retry", ContextVar("batchery_unknown", default=False)
)


@contextmanager
def patient(patience: Patience) -> Iterator[None]:
    """Has what this thread does in Redis, by a backend of `make_patient`, or publishes, wait."""
    token = _patience.set(patience)
    try:
        yield
    finally:
        _patience.reset(token)


def has_run_out() -> bool:
    """Whether this thread's patience did not suffice."""
    patience = _patience.get()
    return patience is not None and patience.ran_out


class _Pause(AbstractBackoff):
    """Pauses between attempts of one command; redis-py asks for them here."""

    def compute(self, failures: int) -> float:
        if patience := _patience.get():
            patience.wait(failures, "no answer to a command")
        return 0.0


class _PatientRetry(Retry):
    """Retries of a client: its own, but inside `patient`."""

    def __init__(self, own: Retry | None) -> None:
        super().__init__(_Pause(), -1, AWAY)
        self._own = own or Retry(NoBackoff(), 0)

    def call_with_retry(self, *args: Any, **options: Any) -> Any:
        if _patience.get() is None:
            return self._own.call_with_retry(*args, **options)
        return super().call_with_retry(*args, **options)


def make_patient(backend: Any) -> None:
    """Lets a backend try again where it is away, unless the app has its own mind about it.

    Args:
        backend: Of a thread of its own, which may wait; inside `patient`.
    """
    if backend.always_retry:
        return
    backend.always_retry = True
    backend.max_retries = STORE_RETRIES
    errors = getattr(backend, "connection_errors", None)
    if errors is not None:
        backend.connection_errors = (*errors, *REFUSALS)
    if isinstance(backend, RedisBackend):
        client: redis.Redis = backend.client
        client.set_retry(_PatientRetry(client.get_retry()))


def make_enduring(backend: Any) -> None:
    """Lets what Celery's tracer writes at the end of a job wait by itself.

    For ordinary jobs: their functions run in the same thread, and shall not wait.

    Args:
        backend: Of a thread of its own; after `make_patient`.
    """
    for name in ("mark_as_done", "mark_as_failure", "mark_as_retry"):
        stock = getattr(backend, name)
        if not isinstance(stock, partial):
            setattr(backend, name, partial(_endure, stock))


def _endure(stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if _patience.get() is not None:
        return stock(*args, **options)
    with patient(Patience()):
        return stock(*args, **options)


def publish_patiently(app: Celery) -> None:
    """Lets what a thread publishes inside `patient`, and what follows any job, wait as results do.

    Args:
        app: Whose messages; once is enough, and twice does no harm.
    """
    messages: Any = app.amqp
    if not isinstance(messages.send_task_message, partial):
        messages.send_task_message = partial(_send, messages.send_task_message)


def _send(stock: Callable[..., Any], producer: Any, *args: Any, **options: Any) -> Any:
    patience = _patience.get()
    if patience is None:
        if not _follows_a_job.get():
            return stock(producer, *args, **options)
        patience = Patience()
    failures = 0
    while True:
        connection = producer.connection
        try:
            return stock(producer, *args, **options)
        except (OperationalError, *connection.recoverable_connection_errors, *REFUSALS) as error:
            failures += 1
            try:
                patience.wait(failures, error)
            except RanOut:
                if _may_come_again():
                    raise
                raise error from None
            producer.revive(connection)


def _may_come_again() -> bool:
    """Whether the message of this thread's job is not acknowledged yet."""
    return _patience.get() is not None or bool(getattr(get_current_task(), "acks_late", False))


def is_away(backend: Any, error: BaseException) -> bool:
    """Whether an error says that the backend takes no results for now, and not that it refused."""
    causes = (error, error.__cause__)
    return isinstance(error, RanOut) or any(
        isinstance(cause, Exception) and backend.exception_safe_to_retry(cause) for cause in causes
    )
