"""Retries of a job's completion while Redis is away; after the deadline the job is given back.

Celery tries to store a result once, to publish a callback for half a second, and to join a chord
once. Then it stores a failure for a job that succeeded, or acknowledges a job whose caller waits
for ever.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import redis
from celery import Celery
from celery._state import get_current_task
from celery.app import amqp
from kombu.exceptions import OperationalError
from redis.backoff import AbstractBackoff, NoBackoff
from redis.retry import Retry

from batchery.completion import current_completion
from batchery.retry import (
    AWAY_ERRORS,
    REFUSALS,
    RetryDeadline,
    RetryDeadlineExceeded,
    is_away,
)

#: Celery's variable that is set while its tracer publishes callbacks and the next step of a chain.
_follows_a_job: ContextVar[bool] = getattr(
    amqp, "_callback_publish_retry", ContextVar("batchery_unknown", default=False)
)


class _DeadlineBackoff(AbstractBackoff):
    """The pauses between attempts of one command; redis-py asks for them here."""

    def compute(self, failures: int) -> float:
        if completion := current_completion():
            completion.deadline.wait(failures, "no answer to a command")
        return 0.0


class DeadlineRetry(Retry):
    """Retries of a Redis client: within a completion until its deadline, else the client's own."""

    def __init__(self, own: Retry | None) -> None:
        """Wraps the client's own retries; None if it has none."""
        super().__init__(_DeadlineBackoff(), -1, AWAY_ERRORS)
        self._own = own or Retry(NoBackoff(), 0)

    def call_with_retry(self, do: Callable[[], Any], *args: Any, **options: Any) -> Any:
        """Calls a command, and repeats it as long as the completion may wait."""
        if current_completion() is None:
            return self._own.call_with_retry(do, *args, **options)
        return super().call_with_retry(partial(_recognise_refusal, do), *args, **options)


def _recognise_refusal(do: Callable[[], Any]) -> Any:
    """Calls a command of which Redis 6.2 does not say clearly that there is no room to write."""
    try:
        return do()
    except redis.ResponseError as error:
        if is_away(error) and not isinstance(error, AWAY_ERRORS):
            raise redis.OutOfMemoryError(*error.args) from error
        raise


def publish_until_deadline(app: Celery) -> None:
    """Makes messages of completions wait while Redis is away: callbacks, chain steps, retries.

    Args:
        app: The app that sends them. A second call for the same app changes nothing.
    """
    messages: Any = app.amqp
    if not isinstance(messages.send_task_message, partial):
        messages.send_task_message = partial(_send, messages.send_task_message)


def _send(stock: Callable[..., Any], producer: Any, *args: Any, **options: Any) -> Any:
    completion = current_completion()
    if completion is None and not _follows_a_job.get():
        return stock(producer, *args, **options)
    deadline = RetryDeadline() if completion is None else completion.deadline
    failures = 0
    while True:
        connection = producer.connection
        try:
            return stock(producer, *args, **options)
        except (OperationalError, *connection.recoverable_connection_errors, *REFUSALS) as error:
            failures += 1
            try:
                deadline.wait(failures, error)
            except RetryDeadlineExceeded:
                if _may_come_again():
                    raise
                raise error from None
            producer.revive(connection)


def _may_come_again() -> bool:
    """Whether the message of this thread's job is not acknowledged yet."""
    late = bool(getattr(get_current_task(), "acks_late", False))
    return current_completion() is not None or late


def is_backend_away(backend: Any, error: BaseException) -> bool:
    """Whether an error means that a backend takes no results for now; False if it refused one."""
    causes = (error, error.__cause__)
    return isinstance(error, RetryDeadlineExceeded) or any(
        isinstance(cause, Exception) and backend.exception_safe_to_retry(cause) for cause in causes
    )
