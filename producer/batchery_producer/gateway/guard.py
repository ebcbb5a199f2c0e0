"""What every request passes first: its name, its key, its size, its time, and how many run.

Here requests are counted, and here errors of all kinds become answers.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchery.gateway_settings import GatewaySettings, is_loopback
from batchery_producer.gateway.callers import Caller, Callers
from batchery_producer.gateway.connection import EXTENSION, Connection
from batchery_producer.gateway.metrics import OTHER_ROUTE, Measurements
from batchery_producer.gateway.problems import Kind, Problem, answer, build_problem, log_failure

#: Names that callers may give their requests: fit for a header and a line of a log.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
REQUEST_ID_HEADER = b"x-request-id"

#: Paths that need no key: probes, and the page, which asks for one.
OPEN_PATHS = frozenset({"/health", "/"})
OPEN_PREFIX = "/page/"

#: In how many seconds to come again where too many requests are in flight.
BUSY_RETRY_S = 1.0

#: Maximum bytes in memory at once, in this process: bodies, and answers that are not read yet.
MAX_BUFFERED_BYTES = 512 << 20

#: What each caller may have of them in any case.
MIN_SHARE_BYTES = 1 << 20

#: Maximum bytes of uploads whose requests have no answer, in this process: on disk or in Redis.
MAX_UPLOADED_BYTES = 2 << 30


class Guard:
    """Refuses requests before they cost anything; ASGI around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers,
        settings: GatewaySettings,
        measurements: Measurements,
        routes: Iterable[str] = (),
        uploads: Mapping[str, int] | None = None,
    ) -> None:
        """Wraps an application.

        Args:
            app: What it wraps.
            callers: Who may call.
            settings: How much they may ask for.
            measurements: Where requests are counted.
            routes: The paths of all routes, as templates; all others are one.
            uploads: Maximum bytes of bodies that are not kept in memory, by path.
        """
        self._upload_bytes = uploads or {}
        self._app = app
        self._routes = frozenset(routes)
        self._callers = callers
        self._settings = settings
        self._measurements = measurements
        self._hosts = frozenset(settings.hosts)
        self._buffer = Buffer(MAX_BUFFERED_BYTES, MIN_SHARE_BYTES)
        # Any caller may have one upload, however large.
        largest_bytes = max(self._upload_bytes.values(), default=0)
        self._uploads = Buffer(MAX_UPLOADED_BYTES, largest_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The server drops the body of the answer.
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        status, is_whole = 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [*message["headers"], (REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": named}
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        began_s = time.perf_counter()
        try:
            with self._measurements.in_flight.track_inprogress():
                await self._pass(scope, headers, receive, send_named)
        except (Exception, asyncio.CancelledError) as error:
            if not status:
                problem = find_problem(error)
                log_failure(scope, problem, None if problem is error else error)
                await answer(scope["path"], problem)(scope, receive, send_named)
            elif isinstance(error, Exception):
                raise  # An answer that has begun stays cut off.
        finally:
            # One that has no end was left by its caller.
            done = status if is_whole else Kind.GONE.status
            route, duration_s = self._find_route(scope), time.perf_counter() - began_s
            self._measurements.count_request(route, done, duration_s)

    async def _pass(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        path = scope["path"]
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        if needs_no_key(path) and scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        caller = self._callers.identify_caller(headers)
        scope["state"]["caller"] = caller
        if caller.in_flight >= caller.max_concurrency:
            raise _busy(f"{caller.in_flight} requests of {caller.name} are in flight, the maximum")
        is_file = path in self._upload_bytes
        max_bytes = self._upload_bytes.get(path, self._settings.max_body_bytes)
        buffer = self._uploads if is_file else self._buffer
        keep = partial(buffer.keep, caller)
        body = Body(receive, max_bytes, self._settings.body_timeout_s, keep, is_file=is_file)
        caller.in_flight += 1
        try:
            body.check_length(headers.get(b"content-length", b"0"))
            if not is_file:
                await body.read()
            await self._app(scope, body.receive, send)
            kept_bytes = 0 if is_file else body.received_bytes
            await self._wait_read(scope["extensions"][EXTENSION], caller, kept_bytes)
        finally:
            caller.in_flight -= 1
            keep(-body.received_bytes)

    async def _wait_read(self, connection: Connection, caller: Caller, kept_bytes: int) -> None:
        """Has a request in flight until its answer is read, which is in memory as long."""
        unsent_bytes = connection.unsent_bytes
        if not unsent_bytes:
            return
        try:
            # Any caller may have one answer, however large.
            if not self._buffer.keep(caller, unsent_bytes) and (
                self._buffer.kept_bytes[caller.name] > kept_bytes + unsent_bytes
            ):
                connection.transport.abort()
            await connection.flow.drain()
        finally:
            self._buffer.keep(caller, -unsent_bytes)

    def _find_route(self, scope: Scope) -> str:
        # One that was refused before it came to its route has only a path.
        path = getattr(scope.get("route"), "path", None) or scope["path"]
        return path if path in self._routes else OTHER_ROUTE

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


def _busy(message: str) -> Problem:
    return Problem(Kind.OVERLOADED, message, retry_after_s=BUSY_RETRY_S)


def find_problem(error: BaseException) -> Problem:
    """The problem that whatever ended a request is to its caller, who learns nothing of ours."""
    if isinstance(error, asyncio.CancelledError):
        # Only the end of the process does that.
        text = "the gateway stops, and the call has not ended; send it again"
        close = {"Connection": "close"}
        return Problem(Kind.UNAVAILABLE, text, retry_after_s=BUSY_RETRY_S, headers=close)
    problem = build_problem(error)
    if problem.kind is Kind.FAILED and problem is not error:
        # One of the gateway's own; it may name files and hosts.
        problem.detail, problem.message = problem.message, "the gateway failed; its log says why"
    return problem


class Buffer:
    """How many bytes are in memory, or elsewhere, and for whom.

    A caller may have as many as are left free: alone, half of all; beside another one, a third. So
    whoever comes finds room, and who has most is refused.

    Attributes:
        kept_bytes: What each caller has, by name.
    """

    def __init__(self, max_bytes: int, min_share_bytes: int) -> None:
        self._free_bytes, self._min_share_bytes = max_bytes, min_share_bytes
        self.kept_bytes = Counter[str]()

    def keep(self, caller: Caller, more_bytes: int) -> bool:
        """Counts bytes, or fewer if below 0; returns whether the caller may have so many."""
        self.kept_bytes[caller.name] += more_bytes
        self._free_bytes -= more_bytes
        return self.kept_bytes[caller.name] <= max(self._free_bytes, self._min_share_bytes)


class Body:
    """The body of a request, of limited size, within limited time.

    Attributes:
        received_bytes: What has come of it.
    """

    def __init__(
        self,
        receive: Receive,
        max_bytes: int,
        timeout_s: float,
        keep: Callable[[int], bool],
        *,
        is_file: bool,
    ) -> None:
        """Starts its time.

        Args:
            receive: Of the server.
            max_bytes: Of all of it.
            timeout_s: How long it may take, in seconds; a file, from each part to the next.
            keep: Counts the bytes of each part; returns whether its caller may have them.
            is_file: Whether it is one.
        """
        self._receive, self._timeout_s, self._is_file = receive, timeout_s, is_file
        self._max_bytes, self._keep = max_bytes, keep
        self._ends_s = asyncio.get_running_loop().time() + self._timeout_s
        self.received_bytes = 0
        self._is_whole = False
        self._content: bytes | None = None

    def check_length(self, told: bytes) -> None:
        """Looks at the length that the head tells.

        Raises:
            Problem: That is too much already.
        """
        self._check_size(int(told) if told.isdigit() else 0)

    async def read(self) -> None:
        """Reads it to its end, into memory; raises as `receive`."""
        parts: list[bytes] = []
        while not self._is_whole:
            parts.append((await self.receive()).get("body", b""))
        self._content = b"".join(parts)

    async def receive(self) -> Message:
        """The next message for the application.

        Raises:
            Problem: The body is too large or too slow, or the caller has hung up, or has too much
                in memory.
        """
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends_s):
                message = await self._receive()
        except TimeoutError:
            text = f"nothing of the body, or not all of it, came within {self._timeout_s:g} s"
            raise Problem(Kind.TOO_SLOW, text, headers={"Connection": "close"}) from None
        if message["type"] != "http.request":
            raise Problem(Kind.GONE, "the caller has hung up")
        part_bytes = len(message.get("body", b""))
        self.received_bytes += part_bytes
        may_keep = self._keep(part_bytes)
        self._check_size(self.received_bytes)
        if not may_keep:
            raise _busy("what this key has sent and not read takes its share of memory")
        self._is_whole = not message.get("more_body", False)
        if self._is_file:
            self._ends_s = asyncio.get_running_loop().time() + self._timeout_s
        return message

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            # The rest is dropped as it comes: whoever cannot send it to its end never sees why.
            text = f"the body is larger than {self._max_bytes} bytes"
            raise Problem(Kind.TOO_LARGE, text)
