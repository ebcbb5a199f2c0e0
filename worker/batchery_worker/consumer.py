"""Celery's consumer, which a malformed message cannot end, and which tells callers of refusals.

Celery trusts a message's headers and the form of its body. What it does not expect ends the worker,
and then the next worker that is given the message. What it refuses it drops, and the caller waits
for ever. Here every message is checked first, and whatever handling one raises ends that message:
it becomes a dead letter, and its caller gets a FAILURE.
"""

import bz2
import logging
import lzma
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import redis
from celery import signals
from celery.exceptions import InvalidTaskError, NotRegistered, Reject
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer
from kombu import compression as kombu_compression
from kombu.exceptions import ContentDisallowed, DecodeError

from batchery.errors import InvalidItem
from batchery.log_pace import LogPace
from batchery.settings import describe_file, settings_file
from batchery.task import BatchTask
from batchery.transport import dead_letters
from batchery.transport.dead_letters import read_embed
from batchery_worker.dispatch.dead_letters import dead_letter_on_ack, store_failure
from batchery_worker.request import get_lease, give_back

_Consumer: Any = Consumer

logger = logging.getLogger("batchery.worker")

#: Errors of files, processes and mappings: kombu counts every `OSError` and `KeyError` as a lost
#: connection, and a message whose handling always raised one would make the worker connect anew for
#: ever.
NO_CONNECTION = (
    KeyError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ChildProcessError,
    ProcessLookupError,
)


#: Errors that say all of a malformed message; of others the log shows where they were raised.
MALFORMED = (InvalidTaskError, DecodeError, ContentDisallowed)

compression: Any = kombu_compression

#: What makes an object that decompresses piece by piece, by kombu's name of the method. Kombu takes
#: zstd from wherever this Python has it.
DECOMPRESSORS: Mapping[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    # The memory of this one is what the message says.
    "application/x-lzma": partial(lzma.LZMADecompressor, memlimit=dead_letters.MAX_MESSAGE_BYTES),
    "application/zstd": lambda: compression.zstd.ZstdDecompressor(),
}


class OutageLog:
    """Logs that the broker is away: at once, then once a minute."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._pace = LogPace(clock)

    def __call__(self, error: Exception, _pause_s: float) -> None:
        """Called by kombu after each attempt that failed."""
        if not self._pace.is_due(self._url):
            return
        if isinstance(error, redis.AuthenticationError):
            error = redis.AuthenticationError(
                f"{error}; set its user and password in broker_url, for batchery.app in"
                " BATCHERY_REDIS_URL, as redis://USER:PASSWORD@HOST:PORT/0"
            )
        logger.error(
            "Cannot connect to %s: %s. Trying on; the next such line comes in a minute",
            self._url,
            str(error).rstrip("."),
        )


class GuardedConsumer(_Consumer):  # type: ignore[misc]
    """That of a device: see `batchery_worker.device.stock_consumer`."""

    connection_errors: Any

    def create_task_handler(self, *args: Any) -> Callable[[Any], None]:
        """Makes the function that is called with each message."""
        handle = super().create_task_handler(*args)

        def guarded(message: Any) -> None:
            try:
                check(message)
            except DecodeError as error:
                self.on_decode_error(message, error)
            except Exception as error:  # noqa: BLE001 - a message may be malformed in any way
                self.on_invalid_task(None, message, error)
            else:
                try:
                    handle(message)
                except Exception as error:  # noqa: BLE001 - it would end worker after worker
                    self.end_unhandled(message, error)

        return guarded

    def end_unhandled(self, message: Any, error: Exception) -> None:
        """Refuses a message whose handling has raised an error.

        Raises:
            Exception: The error, if it says that the broker's connection is lost.
        """
        if isinstance(error, self.connection_errors) and not isinstance(error, NO_CONNECTION):
            raise error
        state: Any = worker_state
        for request in [*state.reserved_requests, *state.scheduled_requests]:
            if request.message is message:
                worker_state.task_ready(request)
        self.on_invalid_task(None, message, error)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Refuses a body that cannot be read."""
        if not self._refuse(message, exc):
            self._report(
                message, lambda: super(GuardedConsumer, self).on_decode_error(message, exc)
            )

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Refuses a message that can be read and is no job."""
        if self._refuse(message, exc):
            signals.task_rejected.send(sender=self, message=message, exc=exc)
        else:
            self._report(
                message, lambda: super(GuardedConsumer, self).on_invalid_task(body, message, exc)
            )

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Refuses a job of a task that this worker does not have; its caller hears of it."""
        reason = f"no such task in this worker: {exc}"
        if not settings_file().exists():
            # A worker that was started in the wrong folder has none of the models.
            reason += f"; if it is a model of the settings, {describe_file()}"
        headers = message.headers if "task" in message.headers else message.payload
        task_id, name = headers["id"], headers["task"]
        if not self._keep(message, reason, headers, NotRegistered(name)):
            self._report(
                message, lambda: super(GuardedConsumer, self).on_unknown_task(body, message, exc)
            )
            return
        if self.event_dispatcher:
            error = f"NotRegistered({name!r})"
            self.event_dispatcher.send("task-failed", uuid=task_id, exception=error)
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=name, id=task_id)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Refuses a message that is no job of Celery's at all."""
        reason = "the message is no job: neither its headers nor its body name a task"
        if self._keep(message, reason, {}, InvalidItem(reason)):
            signals.task_rejected.send(sender=self, message=message, exc=None)
        else:
            self._report(
                message, lambda: super(GuardedConsumer, self).on_unknown_message(body, message)
            )

    def _report(self, message: Any, report: Callable[[], None]) -> None:
        """Makes Celery log the message and take it off the queue, whatever it looks like."""
        try:
            report()
        except self.connection_errors:
            raise
        except Exception:
            logger.exception("a malformed message cannot be shown")
            if not message.acknowledged:
                message.reject_log_error(logger, self.connection_errors)

    def _refuse(self, message: Any, error: Exception) -> bool:
        """Keeps a malformed message as a dead letter, if it is leased; returns whether it is."""
        reason = f"the message is malformed: {type(error).__name__}: {error}"
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        task_id, name = headers.get("id"), headers.get("task")
        is_named = isinstance(task_id, str) and isinstance(name, str)
        told, with_traceback = InvalidItem(reason), not isinstance(error, MALFORMED)
        if self._keep(message, reason, headers if is_named else {}, told, with_traceback):
            return True
        # An ordinary task's message on another transport is dropped silently, as Celery does.
        if is_named and isinstance(self.app.tasks.get(name), BatchTask):
            store_failure(self.app, {**embedded(message), **headers}, told)
        return False

    def _keep(
        self,
        message: Any,
        reason: str,
        headers: Mapping[str, Any],
        error: Exception,
        with_traceback: bool = False,
    ) -> bool:
        """Keeps a message as a dead letter as soon as its caller is told, if it is leased.

        Args:
            message: A `kombu.Message`.
            reason: The reason, for people.
            headers: What says whom to tell; empty if nothing does.
            error: What the caller is told.
            with_traceback: Whether the log shows where the current exception was raised.

        Returns:
            Whether it is leased; Celery settles any other.
        """
        if not dead_letter_on_ack(message, reason, with_traceback=with_traceback):
            return False
        lease = get_lease(message)
        assert lease is not None
        if headers:
            store_failure(self.app, {**embedded(message), **headers}, error, lease)
        else:
            lease.store.ack(lease.token)
        return True


def embedded(message: Any) -> Mapping[str, Any]:
    """Callbacks, errbacks, chain and chord of a message, where its body can be read."""
    try:
        _, _, embed = message.payload
        return dict(embed)
    except Exception:  # noqa: BLE001 - a message may be malformed in any way
        return read_embed(message.body)


def refuse_what_raises(consumer: Any, process: Callable[[Any], None]) -> Callable[[Any], None]:
    """Has each job refused that cannot be handed to the pool, also one that has waited before.

    Args:
        consumer: Has brought the jobs.
        process: Hands a request to its pool.

    Returns:
        What to call in the place of `process`.
    """

    def process_task(request: Any) -> None:
        try:
            process(request)
        except Reject as error:
            # It has run, and its result found no backend.
            logger.warning("%s[%s] is given back: %s", request.name, request.id, error)
            give_back(request)
        except Exception as error:  # noqa: BLE001 - it would end worker after worker
            consumer.end_unhandled(request.message, error)

    return process_task


def bound_decompression() -> None:
    """Has compressed messages refused in this process that say more than any message may."""
    for method, make in DECOMPRESSORS.items():
        if method in compression.encoders():
            encode, _ = compression.get_encoder(method)
            compression.register(encode, partial(_decompress, make), method)


def _decompress(make: Callable[[], Any], body: bytes) -> bytes:
    """Decompresses a body.

    Raises:
        InvalidItem: There would be more of it than a worker reads.
        ValueError: It is not one whole stream.
    """
    maximum, decompressor = dead_letters.MAX_MESSAGE_BYTES, make()
    decompressed: bytes = decompressor.decompress(body, maximum + 1)
    dead_letters.check_size(decompressed)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("the compressed body is not one whole stream")
    return decompressed


def check(message: Any) -> None:
    """Checks what Celery takes for granted.

    Args:
        message: A `kombu.Message`, of Celery's protocol 1 or 2.

    Raises:
        InvalidTaskError: Its name or id is no text, or none for one line of a log; a header is of a
            wrong type, or its body has another form.
        DecodeError: The body cannot be decoded.
        ContentDisallowed: The worker does not accept the body's content type.
    """
    headers = message.headers
    if not isinstance(headers, Mapping):
        raise InvalidTaskError(f"the headers are {type(headers).__name__}, not a mapping")
    known, parts = _read(headers, message.payload)
    if known is None:
        # It is no job at all: Celery says so and rejects it.
        return
    for name in ("task", "id"):
        value = known.get(name)
        if not isinstance(value, str):
            raise InvalidTaskError(f"its {name} is {value!r:.100}, not a text")
        if not value.isprintable():
            raise InvalidTaskError(f"its {name} is {value!r:.100}, not all of which can be printed")
    for name, (kind, is_right, expected) in HEADERS.items():
        value = known.get(name)
        if value is None or (isinstance(value, kind) and (is_right is None or is_right(value))):
            continue
        raise InvalidTaskError(f"its {name} is {value!r:.100}, not {expected}")
    args, keywords, embed = parts
    if not isinstance(args, list | tuple) or not isinstance(keywords, Mapping):
        raise InvalidTaskError("the body is not a list of arguments, and a mapping of keywords")
    if embed is not None:
        _check_embed(embed)


def _read(headers: Mapping[str, Any], body: Any) -> tuple[Mapping[str, Any] | None, Any]:
    """What says which job a message is, and its arguments, keywords, and what follows it.

    Raises:
        InvalidTaskError: The body has another form.
    """
    is_known = "task" in headers
    if isinstance(body, Mapping) and ("args" if is_known else "task") in body:
        # Celery's first protocol, in which both may be missing.
        parts = (body.get("args") or (), body.get("kwargs") or {}, body)
        return headers if is_known else body, parts
    if not is_known:
        return None, ()
    if not isinstance(body, list | tuple) or len(body) != 3:
        raise InvalidTaskError("the body is not a list of arguments, keywords and callbacks")
    return headers, body


def _check_embed(embed: Any) -> None:
    if not isinstance(embed, Mapping):
        raise InvalidTaskError(f"its callbacks are {embed!r:.100}, not in a mapping")
    for name in ("callbacks", "errbacks", "chain"):
        if (signatures := embed.get(name)) and not _holds_only(signatures, Mapping):
            raise InvalidTaskError(f"its {name} are {signatures!r:.100}, not a list of signatures")
    if (chord := embed.get("chord")) and not isinstance(chord, Mapping):
        raise InvalidTaskError(f"its chord is {chord!r:.100}, not a signature")


def _holds_only(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, kind) for each in value)


#: JSON has whole numbers that are larger than any float.
MAX_LIMIT_S = sys.float_info.max


def _are_limits(value: Any) -> bool:
    # Most jobs have none, and each job is asked.
    return value == NO_LIMITS or (len(value) == 2 and all(map(_is_limit, value)))


def _is_limit(value: Any) -> bool:
    # Celery takes 0 for none.
    return value is None or (isinstance(value, int | float) and 0 <= value <= MAX_LIMIT_S)


NO_LIMITS = [None, None]

#: Headers that Celery reads when it is too late to refuse the message, and what they must be: their
#: type, what their contents must be, and both in words.
HEADERS: Mapping[str, tuple[Any, Callable[[Any], bool] | None, str]] = {
    "shadow": (str, str.isprintable, "a text that can be printed"),
    "timelimit": ((list, tuple), _are_limits, "a hard and a soft time limit in seconds"),
    "stamped_headers": ((list, tuple), lambda value: _holds_only(value, str), "a list of names"),
    "stamps": (dict, None, "a mapping"),
    "retries": (int, None, "a whole number"),
    "replaced_task_nesting": (int, None, "a whole number"),
}
