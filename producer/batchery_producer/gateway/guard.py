"""What every request passes first: its key, its size, its time, and how many run at once."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchery.gateway_settings import GatewaySettings, is_loopback
from batchery_producer.gateway.callers import Caller, Callers
from batchery_producer.gateway.connection import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    Connection,
    get_connection,
)
from batchery_producer.gateway.problems import Kind, Problem, answer

#: Paths that need no key: probes, and the page, which asks for one.
OPEN_PATHS = frozenset({"/health", "/", "/favicon.ico"})
OPEN_PREFIX = "/page/"

#: Bodies of this path may be as large as a file, and are not kept in memory.
FILES_PATH = "/v1/files"

#: In how many seconds to come again where too many requests are in flight.
BUSY_RETRY_S = 1.0

#: Maximum bytes in memory at once, in this process: bodies, and answers that are not read yet.
MAX_BUFFERED_BYTES = 512 << 20

#: What each caller may have of them in any case.
MIN_SHARE_BYTES = 1 << 20

#: Minimum mean rate of the upload of a file, after the first `body_timeout_s`.
MIN_UPLOAD_BYTES_PER_S = 32_768


class Guard:
    """Refuses requests before they cost anything; ASGI around the routes."""

    def __init__(self, app: ASGIApp, *, callers: Callers, settings: GatewaySettings) -> None:
        self._app = app
        self._callers = callers
        self._settings = settings
        self._hosts = frozenset(settings.hosts)
        self._buffer = Buffer(MAX_BUFFERED_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The server drops the body of the answer.
            scope = {**scope, "method": "GET"}
        try:
            await self._pass(scope, receive, send)
        except Problem as problem:
            await answer(scope["path"], problem)(scope, receive, send)
        except asyncio.CancelledError:
            # Only the end of the process does that. An answer that has begun stays cut off.
            with suppress(RuntimeError):
                await answer(scope["path"], stopping())(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        check_head(scope)
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if needs_no_key(path) and scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        caller = self._callers.identify_caller(headers)
        scope.setdefault("state", {})["caller"] = caller
        connection = get_connection(scope)
        body = Body(
            connection,
            receive,
            headers,
            self._settings,
            partial(self._buffer.keep, caller),
            is_file=path == FILES_PATH,
        )
        try:
            if not body.is_file:
                await self._read(body, caller)
            # Only now: slow callers must not take the place of others.
            if caller.in_flight >= caller.max_concurrency:
                raise _busy(
                    f"{caller.in_flight} requests of {caller.name} are in flight, the maximum"
                )
            caller.in_flight += 1
            try:
                await self._app(scope, body.receive, send)
            finally:
                self._end_when_read(connection, caller)
        finally:
            self._buffer.release(caller, body.kept_bytes)

    async def _read(self, body: "Body", caller: Caller) -> None:
        if caller.open_bodies >= caller.max_concurrency:
            raise _busy(
                f"{caller.open_bodies} requests of {caller.name} are being sent, the maximum"
            )
        caller.open_bodies += 1
        try:
            await body.read()
        finally:
            caller.open_bodies -= 1

    def _end_when_read(self, connection: Connection, caller: Caller) -> None:
        """Has a request in flight until its answer is sent; the answer is in memory as long."""
        unsent_bytes = connection.unsent_bytes
        if not self._buffer.keep(caller, unsent_bytes) and caller.kept_bytes > unsent_bytes:
            # Any caller may have one answer, however large.
            connection.abort()

        def end() -> None:
            caller.in_flight -= 1
            self._buffer.release(caller, unsent_bytes)

        connection.when_flushed(end)

    def _check_host(self, given: str) -> None:
        """Keeps web pages out that have a name for this machine's loopback address."""
        name = given.rsplit(":", 1)[0] if not given.endswith("]") else given
        if self._hosts:
            if name in self._hosts or "*" in self._hosts:
                return
        elif self._callers.have_keys or not name or is_loopback(name):
            return
        raise Problem(
            Kind.FORBIDDEN, f"host {name!r:.100} is not served; see the setting gateway.hosts"
        )


def needs_no_key(path: str) -> bool:
    """Whether anybody may get a path."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def check_head(scope: Scope) -> None:
    """Makes sure that a head is no larger than one may be that comes in several parts.

    Raises:
        Problem: It is.
    """
    head_bytes = len(scope["path"]) + len(scope.get("query_string", b""))
    head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if head_bytes > MAX_HEAD_BYTES:
        raise Problem(Kind.HEAD_TOO_LARGE, HEAD_TOO_LARGE, headers={"Connection": "close"})


def _busy(message: str) -> Problem:
    return Problem(Kind.OVERLOADED, message, retry_after_s=BUSY_RETRY_S)


def stopping() -> Problem:
    """What calls are answered with that take longer than the process has."""
    return Problem(
        Kind.UNAVAILABLE,
        "the gateway stops, and the call has not ended; send it again",
        retry_after_s=BUSY_RETRY_S,
        headers={"Connection": "close"},
    )


class Buffer:
    """How many bytes are in memory, and for whom.

    A caller may have as many as are left free: alone, half of all; beside another one, a third. So
    whoever comes finds room, and who has most is refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes

    def keep(self, caller: Caller, more_bytes: int) -> bool:
        """Counts bytes; returns whether the caller may have so many."""
        caller.kept_bytes += more_bytes
        self._free_bytes -= more_bytes
        return caller.kept_bytes <= max(self._free_bytes, MIN_SHARE_BYTES)

    def release(self, caller: Caller, fewer_bytes: int) -> None:
        """Counts bytes that are gone."""
        caller.kept_bytes -= fewer_bytes
        self._free_bytes += fewer_bytes


class Body:
    """The body of a request, of limited size, within limited time."""

    def __init__(
        self,
        connection: Connection,
        receive: Receive,
        headers: dict[bytes, bytes],
        settings: GatewaySettings,
        keep: Callable[[int], bool],
        *,
        is_file: bool,
    ) -> None:
        """Looks at the length that the head tells.

        Raises:
            Problem: That is too much already.
        """
        self.is_file = is_file
        #: Bytes that `keep` has counted.
        self.kept_bytes = 0
        self._connection = connection
        self._receive = receive
        self._max_bytes = settings.max_file_bytes if is_file else settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s
        self._began_s = time.monotonic()
        self._received_bytes = 0
        self._keep = keep
        self._messages: deque[Message] = deque()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    async def read(self) -> None:
        """Reads it to its end, before anything else is done for the request.

        Raises:
            Problem: It is too large, or too slow.
        """
        parts: list[bytes] = []
        is_whole = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while not is_whole:
                    message = await self._next()
                    part = message.get("body", b"")
                    parts.append(part)
                    self.kept_bytes += len(part)
                    if not self._keep(len(part)):
                        raise _busy("the bodies and answers of this key take its share of memory")
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            raise self._too_slow() from None
        self._messages.append({"type": "http.request", "body": b"".join(parts), "more_body": False})

    async def receive(self) -> Message:
        """The next message for the application.

        Raises:
            Problem: Nothing more is waited for: a file is too slow or cut off, or the process ends.
        """
        if self._messages:
            return self._messages.popleft()
        if not self.is_file:
            message = await self._receive()
            if self._connection.is_ending:
                raise stopping()
            return message
        earned_s = self._received_bytes / MIN_UPLOAD_BYTES_PER_S
        left_s = self._began_s + self._timeout_s + earned_s - time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, self._timeout_s)):
                message = await self._next()
        except TimeoutError:
            raise self._too_slow() from None
        if not message.get("more_body", False):
            self.is_file = False  # What comes now says that the caller has gone.
        return message

    async def _next(self) -> Message:
        """The next part of it."""
        message = await self._receive()
        if self._connection.is_ending:
            raise stopping()
        if message["type"] != "http.request":
            raise Problem(Kind.GONE, "the caller has hung up")
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes > self._max_bytes:
            raise self._too_large()
        return message

    def _too_large(self) -> Problem:
        # The rest is dropped as it comes: callers who cannot send it to its end never see why.
        return Problem(Kind.TOO_LARGE, f"the body is larger than {self._max_bytes} bytes")

    def _too_slow(self) -> Problem:
        return Problem(
            Kind.TOO_SLOW,
            f"the body did not come within {self._timeout_s:g} s"
            + (f", or slower than {MIN_UPLOAD_BYTES_PER_S} bytes/s" if self.is_file else ""),
            headers={"Connection": "close"},
        )
