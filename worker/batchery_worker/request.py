"""Celery's request, which also knows its lease, and in which batch it ran."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import redis
from celery.exceptions import InvalidTaskError
from celery.worker import state as worker_state
from celery.worker.request import Request as CeleryRequest

from batchery.protocol.headers import expiring_as_asked
from batchery.protocol.pieces import tell_readers
from batchery.transport.lease_store import LeaseStore

_Request: Any = CeleryRequest


class LeaseHandle(NamedTuple):
    """The lease of a message whose job is not done."""

    store: LeaseStore
    token: str

    @property
    def is_held(self) -> bool:
        """Whether it is held, as far as this process knows; from any thread."""
        return self.store.holds(self.token)


def get_lease(message: Any) -> LeaseHandle | None:
    """The lease of a `kombu.Message`; None where another transport brought it."""
    store = getattr(message.channel, "lease_store", None)
    tag = message.delivery_tag
    return None if store is None or not tag.isdigit() else LeaseHandle(store, tag)


def give_back(request: Any) -> None:
    """Returns the message of a request to its queue: the job has run, and nothing is stored."""
    worker_state.task_ready(request)
    request.reject(requeue=True)


def _noted(end: Callable[..., None], ends: list[Callable[[], None]]) -> Callable[..., None]:
    return lambda *args: ends.append(partial(end, *args))


class BatchRequest(_Request):  # type: ignore[misc]
    """A request of a batch task, on any pool."""

    #: Facts of the batch, once there was one; they ride in the task-succeeded event.
    batch: Mapping[str, Any] | None = None
    #: The third part of the message's body: callbacks, and what follows in a chain.
    embed: Mapping[str, Any] | None

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        """Reads a message.

        Raises:
            InvalidTaskError: It is malformed, and the consumer refuses it. Any other error raised
                here would end the worker, and the next one that is given the message.
        """
        try:
            super().__init__(message, *args, **options)
            self.embed = self._payload[2]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidTaskError(f"{type(error).__name__}: {error}") from error
        self._lease = get_lease(message) if self.task.acks_late else None

    @property
    def discarded(self) -> bool:
        """Whether the job was revoked or cancelled while it ran: its outcome is not wanted."""
        return bool(self._already_revoked or self._already_cancelled)

    @property
    def lease(self) -> LeaseHandle | None:
        """The message's lease; None where there is none (any more), as with other transports."""
        return None if self.acknowledged else self._lease

    def on_failure(self, *args: Any, **options: Any) -> None:
        """Fails the job, and ends its message behind that: Celery ends it first.

        Raises:
            Exception: The failure cannot be stored, as its backend is away; the message is held.
        """
        ends: list[Callable[[], None]] = []
        stock: Any = self._on_ack, self._on_reject  # type: ignore[has-type]
        self._on_ack, self._on_reject = (_noted(end, ends) for end in stock)
        try:
            super().on_failure(*args, **options)
        except BaseException:
            self.acknowledged = False
            raise
        finally:
            self._on_ack, self._on_reject = stock
        for end in ends:
            end()

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Drops the job while it runs; it also ends if its batch has no others."""
        lease = self.lease
        super().terminate(pool, signal)
        if lease is not None:
            # Its device may be about to store the result. Once the lease has ended, it cannot.
            with suppress(redis.RedisError):
                lease.store.flush()
        cancel_job = getattr(pool, "cancel_job", None)
        if cancel_job is not None and self._already_revoked:
            cancel_job(self.id)

    def withdraw(self) -> None:
        """Revokes a job that runs, as nobody wants its result any more.

        Raises:
            Exception: Whatever the result backend raises, which stores that.
        """
        is_expired = bool(self.maybe_expire())
        self._announce_revoked("expired" if is_expired else "cancelled", True, None, is_expired)

    def _announce_revoked(self, *args: Any) -> None:
        backend = self.task.backend
        with expiring_as_asked(backend, self._context):
            super()._announce_revoked(*args)
        tell_readers(backend, self.id, self.request_dict)

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002 - Celery's name
        """Sends a task event, with the facts of the batch where the job succeeded."""
        if type == "task-succeeded" and self.batch is not None:
            fields["batch"] = self.batch
        super().send_event(type, **fields)
