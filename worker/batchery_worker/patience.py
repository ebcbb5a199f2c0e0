"""What happens to a result while its backend is away: it waits, and then its job is given back.

Celery tries once, acknowledges the job, and its caller waits for ever.
"""

from typing import Any

import redis

#: How often a result is tried again. Celery's pauses between them grow to ten seconds, half of it
#: on average: about half a minute together, as long as a shutdown may have to wait.
STORE_RETRIES = 15

#: Errors of a Redis that is there and takes no results for now: it is full, or only a replica.
REFUSALS = (redis.OutOfMemoryError, redis.ReadOnlyError)


def make_patient(backend: Any) -> None:
    """Lets a backend try again where it is away, unless the app has its own mind about it.

    Args:
        backend: Of a thread of its own, which may wait.
    """
    if not backend.always_retry:
        backend.always_retry = True
        backend.max_retries = STORE_RETRIES
    errors = getattr(backend, "connection_errors", None)
    if errors is not None and not set(REFUSALS) <= set(errors):
        backend.connection_errors = (*errors, *REFUSALS)


def is_away(backend: Any, error: BaseException) -> bool:
    """Whether an error says that the backend takes no results for now, and not that it refused."""
    causes = (error, error.__cause__)
    return any(
        isinstance(cause, Exception) and backend.exception_safe_to_retry(cause) for cause in causes
    )
