"""What every request passes first: its key, its size, its time, and how many run at once."""

import asyncio
from collections import deque
from functools import lru_cache
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.problems import Kind, Problem, answer

#: Paths that need no key: probes, and the page, which asks for one.
OPEN_PATHS = frozenset({"/health", "/", "/favicon.ico"})
OPEN_PREFIX = "/page/"

#: Bodies of this path may be as large as a file, and are not kept in memory.
FILES_PATH = "/v1/files"

#: In how many seconds to come again where too many requests are in flight.
BUSY_RETRY_S = 1.0

#: Bytes of all bodies in memory at once, in this process; beyond that, more are refused.
MAX_BUFFERED_BYTES = 512 << 20


class Guard:
    """Refuses requests before they cost anything; ASGI around the routes."""

    def __init__(self, app: ASGIApp, *, callers: Callers, settings: GatewaySettings) -> None:
        self._app = app
        self._callers = callers
        self._settings = settings
        self._hosts = frozenset(settings.hosts)
        self._buffer = Buffer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._pass(scope, receive, send)
        except Problem as problem:
            await answer(scope["path"], problem)(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        if is_open and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        caller = self._callers.caller_of(headers)
        scope.setdefault("state", {})["caller"] = caller
        body = Body(receive, headers, self._settings, self._buffer, is_file=path == FILES_PATH)
        try:
            if not body.is_file:
                await body.read()
            # Only now: slow callers must not take the place of others.
            if caller.in_flight >= caller.max_concurrency:
                raise _busy(
                    f"{caller.in_flight} requests of {caller.name} are in flight, the maximum"
                )
            caller.in_flight += 1
            try:
                await self._app(scope, body.receive, send)
            finally:
                caller.in_flight -= 1
        finally:
            body.release()

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


def _busy(message: str) -> Problem:
    return Problem(Kind.OVERLOADED, message, retry_after_s=BUSY_RETRY_S)


class Buffer:
    """How many bytes of bodies are in memory."""

    def __init__(self) -> None:
        self.used_bytes = 0


class Body:
    """The body of a request, of limited size, within limited time."""

    def __init__(
        self,
        receive: Receive,
        headers: dict[bytes, bytes],
        settings: GatewaySettings,
        buffer: Buffer,
        *,
        is_file: bool,
    ) -> None:
        """Looks at the length that the head tells.

        Raises:
            Problem: That is too much already.
        """
        self.is_file = is_file
        self._receive = receive
        self._max_bytes = settings.max_file_bytes if is_file else settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s
        self._received_bytes = 0
        self._buffer, self._buffered_bytes = buffer, 0
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
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] != "http.request":
                        self._messages.append(message)
                        break
                    parts.append(message.get("body", b""))
                    self._count(len(parts[-1]))
                    self._keep(len(parts[-1]))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise self._too_slow() from None
        self._messages.appendleft(
            {"type": "http.request", "body": b"".join(parts), "more_body": False}
        )

    async def receive(self) -> Message:
        """The next message for the application."""
        if self._messages:
            return self._messages.popleft()
        if not self.is_file:
            return await self._receive()
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        self._count(len(message.get("body", b"")))
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.is_file = False  # What comes now says that the caller has gone.
        return message

    def _count(self, more_bytes: int) -> None:
        self._received_bytes += more_bytes
        if self._received_bytes > self._max_bytes:
            raise self._too_large()

    def _keep(self, more_bytes: int) -> None:
        self._buffered_bytes += more_bytes
        self._buffer.used_bytes += more_bytes
        if self._buffer.used_bytes > MAX_BUFFERED_BYTES:
            raise _busy("the bodies of other requests take all of the memory for bodies")

    def release(self) -> None:
        """Gives back the memory that it took."""
        self._buffer.used_bytes -= self._buffered_bytes
        self._buffered_bytes = 0

    def _too_large(self) -> Problem:
        # The rest is not read, so the connection cannot be used again.
        return Problem(
            Kind.TOO_LARGE,
            f"the body is larger than {self._max_bytes} bytes",
            headers={"Connection": "close"},
        )

    def _too_slow(self) -> Problem:
        return Problem(
            Kind.TOO_SLOW,
            f"the body did not come within {self._timeout_s:g} s",
            headers={"Connection": "close"},
        )


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone, by its name."""
    bare = host.strip("[]")
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False
