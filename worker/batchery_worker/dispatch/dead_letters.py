"""Messages that cannot be executed become dead letters, and their callers get a FAILURE."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.app.task import Context

from batchery.completion import JobCompletion, completing
from batchery.errors import InvalidItem
from batchery.retry import MAX_PAUSE_S, RetryDeadlineExceeded
from batchery.transport import dead_letters
from batchery.transport.lease_store import LeaseStore
from batchery_worker.completion.backend import for_completion
from batchery_worker.request import LeaseHandle

logger = logging.getLogger("batchery.worker")

# The event loop must not wait for the result backend. One thread is enough for these few failures.
_thread = ThreadPoolExecutor(1, thread_name_prefix="batchery-dead-letters")


def dead_letter_on_ack(message: Any, reason: str, *, with_traceback: bool = False) -> bool:
    """Makes a leased message a dead letter at the moment when it is acknowledged or rejected.

    Args:
        message: A `kombu.Message`.
        reason: The reason, for people.
        with_traceback: Whether the log shows where the current exception was raised.

    Returns:
        Whether the message is leased; any other is treated as its broker does.
    """
    store, token = getattr(message.channel, "lease_store", None), message.delivery_tag
    if store is None or not store.holds(token) or (lease := store.leases.get(token)) is None:
        return False
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    lease.dead_letter = _describe(headers, reason, token, with_traceback=with_traceback)
    return True


def dead_letter_unread(app: Celery, store: LeaseStore, token: str, reason: str) -> None:
    """Moves a message that nobody may read to the dead letters, once its caller is told.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    value = store.client.hget(store.lease_key, token)
    headers = dead_letters.readable_headers((value or b"").partition(b"\0")[2])
    letter, lease = _describe(headers, reason, token), store.leases.get(token)
    if not headers or lease is None:
        store.dead_letter(token, letter)
    else:
        lease.dead_letter = letter
        store_failure(app, headers, InvalidItem(letter["reason"]), LeaseHandle(store, token))


def _describe(
    headers: Mapping[str, Any], reason: str, token: str, *, with_traceback: bool = False
) -> dict[str, Any]:
    """Describes a dead letter, and has the log say how to look at it."""
    letter = dead_letters.describe(reason, headers.get("id"), headers.get("task"))
    logger.error(
        "%s[%s] is kept as dead letter, see `batchery dead show %s`: %s",
        *(dead_letters.as_one_line(letter[name]) for name in ("task", "id")),
        token,
        dead_letters.as_one_line(letter["reason"]),
        exc_info=with_traceback,
    )
    return letter


def store_failure(
    app: Celery, headers: Mapping[str, Any], error: Exception, lease: LeaseHandle | None = None
) -> None:
    """Stores a failure on a thread; callers, chains and chords hear of it.

    Args:
        app: Its result backend is used.
        headers: Headers of the message, with an `id`; and `chain`, `chord` and `errbacks` if it has
            them.
        error: What the caller is told.
        lease: That of the message, which is acknowledged then: if this worker dies before, the next
            one tells the caller.
    """
    _thread.submit(_store, app, dict(headers), error, lease)


def _store(
    app: Celery, headers: dict[str, Any], error: Exception, lease: LeaseHandle | None
) -> None:
    if lease is not None and not lease.store.holds(lease.token):
        # Another worker has the message now.
        return
    backend, shown = for_completion(app.backend), dead_letters.as_one_line(headers["id"])
    try:
        with completing(JobCompletion()):
            _mark(backend, headers, error)
    except RetryDeadlineExceeded as away:
        logger.error("the failure of %s cannot be stored: %s", shown, away)
        if lease is not None:
            time.sleep(MAX_PAUSE_S)
            # Others have their turn first. No more is taken on while this process ends.
            with suppress(RuntimeError):
                store_failure(app, headers, error, lease)
        return
    except Exception:
        logger.exception("the failure of %s cannot be stored", shown)
    if lease is not None:
        lease.store.ack(lease.token)


def _mark(backend: Any, headers: dict[str, Any], error: Exception) -> None:
    is_stored, shown = not headers.get("ignore_result"), dead_letters.as_one_line(headers["id"])
    try:
        request = Context(headers)
        backend.mark_as_failure(headers["id"], error, request=request, store_result=is_stored)
    except Exception:
        logger.warning("%s: its headers are of no use", shown, exc_info=True)
        # Without a chord to count, or a chain to fail.
        backend.mark_as_failure(headers["id"], error)
