"""What becomes of messages that cannot be executed: a dead letter, and a FAILURE for the caller."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from celery.app.task import Context

from batchery.errors import InvalidItem
from batchery.transport import dead
from batchery_worker.patience import Patience, RanOut, make_patient, patient

logger = logging.getLogger("batchery.worker")

# The event loop must not wait for the result backend; and these failures are few.
_thread = ThreadPoolExecutor(1, thread_name_prefix="batchery-undertaker")


def serve(app: Celery) -> None:
    """Stores a FAILURE for each message that this process's transport buries from now on."""

    def tell(headers: Mapping[str, Any], reason: str) -> None:
        tell_caller(app, headers, InvalidItem(reason))

    # In place of that of an earlier worker in this process: one failure is enough.
    dead.on_dead[:] = [tell]


def condemn(message: Any, reason: str) -> bool:
    """Makes a dead letter of a leased message where it will be acknowledged or rejected.

    Args:
        message: A `kombu.Message`.
        reason: For people.

    Returns:
        Whether the message is leased; others are treated as the broker has it.
    """
    ledger, token = getattr(message.channel, "ledger", None), message.delivery_tag
    if ledger is None or not ledger.holds(token):
        return False
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    names = (headers.get(name) for name in ("id", "task"))
    task_id, task = (name if isinstance(name, str) else None for name in names)
    ledger.condemn(token, dead.write_letter(reason, task_id, task))
    logger.error("%s[%s] is kept as dead letter %s: %s", task, task_id, token, reason)
    return True


def tell_caller(app: Celery, headers: Mapping[str, Any], error: Exception) -> None:
    """Stores a failure on a thread; callers, chains and chords hear of it.

    Args:
        app: Whose result backend is used.
        headers: Of the message, with an `id`; and `chain`, `chord` and `errbacks` if it has them.
        error: What the caller shall be told.
    """
    _thread.submit(_store, app, dict(headers), error)


def _store(app: Celery, headers: dict[str, Any], error: Exception) -> None:
    backend = app.backend
    make_patient(backend)
    try:
        with patient(Patience()):
            _mark(backend, headers, error)
    except (Exception, RanOut):
        logger.exception("the failure of %s cannot be stored", headers["id"])


def _mark(backend: Any, headers: dict[str, Any], error: Exception) -> None:
    wanted = not headers.get("ignore_result")
    try:
        request = Context(headers)
        backend.mark_as_failure(headers["id"], error, request=request, store_result=wanted)
    except Exception:
        logger.warning("%s: its headers are of no use", headers["id"], exc_info=True)
        # Without a chord to count, or a chain to fail.
        backend.mark_as_failure(headers["id"], error)
