"""Celery's consumer, which a malformed message cannot end, and which tells callers of refusals.

Celery trusts a message's headers and the form of its body. What it does not expect ends the worker,
and then the next worker that is given the message. What it refuses it drops, and the caller waits
for ever. Here every message is checked first, and whatever handling one raises ends that message:
it becomes a dead letter, and its caller gets a FAILURE.
"""

import bz2
import logging
import lzma
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import redis
from celery import signals
from celery.exceptions import InvalidTaskError, NotRegistered
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer
from kombu import compression as kombu_compression
from kombu.exceptions import ContentDisallowed, DecodeError
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from batchery.errors import InvalidItem
from batchery.log_pace import LogPace
from batchery.settings import describe_file, settings_file
from batchery.transport import dead_letters
from batchery.transport.dead_letters import as_one_line, read_embed
from batchery_worker.dispatch.dead_letters import dead_letter_on_ack, store_failure
from batchery_worker.request import get_lease

_Consumer: Any = Consumer

logger = logging.getLogger("batchery.worker")

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
            redis.RedisError: The error, if it says that the connection is lost.
        """
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            raise error
        state: Any = worker_state
        for request in [*state.reserved_requests, *state.scheduled_requests]:
            if request.message is message:
                worker_state.task_ready(request)
        self.on_invalid_task(None, message, error)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Refuses a body that cannot be read."""
        reason = f"the message is malformed: {type(exc).__name__}: {exc}"
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        is_named = all(isinstance(headers.get(name), str) for name in ("id", "task"))
        told, with_traceback = InvalidItem(reason), not isinstance(exc, MALFORMED)
        self._refuse(message, reason, headers if is_named else {}, told, with_traceback)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """Refuses a message that can be read and is no job."""
        self.on_decode_error(message, exc)
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:  # noqa: ARG002
        """Refuses a job of a task that this worker does not have; its caller hears of it."""
        reason = f"no such task in this worker: {exc}"
        if not settings_file().exists():
            # A worker that was started in the wrong folder has none of the models.
            reason += f"; if it is a model of the settings, {describe_file()}"
        headers = message.headers if "task" in message.headers else message.payload
        task_id, name = headers["id"], headers["task"]
        self._refuse(message, reason, headers, NotRegistered(name))
        if self.event_dispatcher:
            error = f"NotRegistered({name!r})"
            self.event_dispatcher.send("task-failed", uuid=task_id, exception=error)
        signals.task_unknown.send(sender=self, message=message, exc=exc, name=name, id=task_id)

    def on_unknown_message(self, body: Any, message: Any) -> None:  # noqa: ARG002
        """Refuses a message that is no job of Celery's at all."""
        reason = "the message is no job: neither its headers nor its body name a task"
        self._refuse(message, reason, {}, InvalidItem(reason))
        signals.task_rejected.send(sender=self, message=message, exc=None)

    def _refuse(
        self,
        message: Any,
        reason: str,
        headers: Mapping[str, Any],
        error: Exception,
        with_traceback: bool = False,
    ) -> None:
        """Ends a message: a leased one becomes a dead letter, as soon as its caller is told.

        Args:
            message: A `kombu.Message`.
            reason: The reason, for people.
            headers: What says whom to tell; empty if nothing does.
            error: What the caller is told.
            with_traceback: Whether the log shows where the current exception was raised.
        """
        is_leased = dead_letter_on_ack(message, reason, with_traceback=with_traceback)
        lease = get_lease(message) if is_leased else None
        if headers:
            store_failure(self.app, {**embedded(message), **headers}, error, lease)
        elif lease is not None:
            lease.store.ack(lease.token)
        if lease is None:
            logger.error("a message is refused: %s", as_one_line(reason), exc_info=with_traceback)
            if not message.acknowledged:
                message.reject_log_error(logger, self.connection_errors)


def embedded(message: Any) -> Mapping[str, Any]:
    """Callbacks, errbacks, chain and chord of a message, where its body can be read."""
    try:
        _, _, embed = message.payload
        return dict(embed)
    except Exception:  # noqa: BLE001 - a message may be malformed in any way
        return read_embed(message.body)


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


def require_printable(text: str) -> str:
    """Refuses what would write lines of a log."""
    if not text.isprintable():
        raise ValueError("not all of it can be printed")
    return text


Printable = Annotated[str, AfterValidator(require_printable)]

#: Of a job, in seconds; Celery takes 0 for none.
LimitS = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class Headers(BaseModel, strict=True):
    """What Celery takes for granted of a message, or reads when it is too late to refuse it."""

    task: Printable
    id: Printable
    shadow: Printable | None = None
    timelimit: Annotated[tuple[LimitS, LimitS], Field(strict=False)] | None = None
    stamped_headers: list[str] | tuple[str, ...] | None = None
    stamps: dict[Any, Any] | None = None
    retries: int | None = None
    replaced_task_nesting: int | None = None


class Embed(BaseModel, strict=True):
    """What follows a job."""

    callbacks: Sequence[Mapping[Any, Any]] | None = None
    errbacks: Sequence[Mapping[Any, Any]] | None = None
    chain: Sequence[Mapping[Any, Any]] | None = None
    chord: Mapping[Any, Any] | None = None


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
    args, keywords, embed = parts
    if not isinstance(args, list | tuple) or not isinstance(keywords, Mapping):
        raise InvalidTaskError("the body is not a list of arguments, and a mapping of keywords")
    if embed is not None and not isinstance(embed, Mapping):
        raise InvalidTaskError(f"its callbacks are {embed!r:.100}, not in a mapping")
    try:
        Headers.model_validate(dict(known))
        Embed.model_validate({name: each for name, each in (embed or {}).items() if each})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidTaskError(f"its {name} is {first['input']!r:.100}: {first['msg']}") from None


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
