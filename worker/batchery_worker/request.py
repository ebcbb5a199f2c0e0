"""Celery's request, which also knows in which batch it ran."""

import logging
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from celery.exceptions import InvalidTaskError
from celery.worker import state as worker_state
from celery.worker.request import Request as CeleryRequest

from batchery.errors import InvalidItem

if TYPE_CHECKING:
    _Request: Any
else:
    _Request = CeleryRequest

logger = logging.getLogger("batchery.pool")


class BatchRequest(_Request):  # type: ignore[misc]
    """A request of a batch task, on any pool."""

    #: Facts of the batch, once there was one; rides in the task-succeeded event.
    batch: Mapping[str, Any] | None = None

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        """Reads a message.

        Raises:
            InvalidTaskError: It is malformed; Celery refuses it then. Whatever else was raised here
                would end the worker, and after it the next one that is given the message.
        """
        try:
            super().__init__(message, *args, **options)
            _check(self._payload, self.time_limits)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"the message is malformed: {type(error).__name__}: {error}"
            _store_failure(options.get("app"), message, InvalidItem(text))
            raise InvalidTaskError(text) from error

    @property
    def discarded(self) -> bool:
        """Whether the job was revoked or cancelled while it ran: its outcome is not wanted."""
        return bool(self._already_revoked or self._already_cancelled)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Drops the job, at the end of a cold shutdown or where a lost connection asks for it.

        A device may have answered while Celery waited: then the job is finished, not dropped.
        """
        finish = getattr(pool, "finish_answered", None)
        if finish is not None:
            finish()
        if self in worker_state.active_requests:
            super().cancel(pool, signal, emit_retry)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002 - Celery's name
        """Sends a task event, with the facts of the batch where it succeeded."""
        if type == "task-succeeded" and self.batch is not None:
            fields["batch"] = self.batch
        super().send_event(type, **fields)


def _check(body: Any, time_limits: Any) -> None:
    """Looks at what Celery reads only later, where it would not expect an error."""
    args, keywords, embed = body
    if not (
        isinstance(args, list | tuple)
        and isinstance(keywords, Mapping)
        and isinstance(embed, Mapping | None)
    ):
        raise TypeError("the body is not a list of arguments, a mapping of keywords and a mapping")
    hard, soft = time_limits
    for limit in (hard, soft):
        if not isinstance(limit, Real | None):
            raise TypeError(f"time limit {limit!r} is not a number")


def _store_failure(app: Any, message: Any, error: InvalidItem) -> None:
    """Tells the caller, who would wait for ever; Celery only refuses such a message."""
    try:
        app.backend.mark_as_failure(message.headers["id"], error)
    except Exception:
        logger.exception("the failure of a malformed message cannot be stored")
