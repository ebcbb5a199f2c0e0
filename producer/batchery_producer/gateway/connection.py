"""A caller's connection: how long its head may take, and what becomes of answers nobody reads."""

import asyncio
import logging
import re
import sys
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

logger = logging.getLogger("uvicorn.error")

#: Names that callers may give their requests: fit for a header and a line of a log.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
REQUEST_ID_HEADER = b"x-request-id"

#: How long a caller has to read why a head was refused, in seconds.
LINGER_S = 1

#: How long a head of a request may be, in bytes: keys and cookies are a few hundred.
MAX_HEAD_BYTES = 65_536

#: What ends a head. Bodies may have it, too, and nothing else: so at least so many bytes are parsed
#: at a time, which are a few dozen heads at most.
HEAD_END = b"\r\n\r\n"
MIN_PARSED_BYTES = 1_024

HEAD_TOO_LARGE = f"the request's head has more than {MAX_HEAD_BYTES} bytes; send smaller headers"

#: How long requests may go on after a stop, in seconds.
GRACE_S = 25

#: How long a connection that was taken before a stop has for its first request, in seconds. Where
#: one process replaces another, its caller would be cut off without an answer.
FIRST_CALL_S = 1

#: Extension of the ASGI scope under which a request finds its connection.
EXTENSION = "batchery.connection"


class Connection(HttpToolsProtocol):
    """A connection that is closed if a head does not come in time, or an answer is not read."""

    def __init__(
        self, *arguments: Any, head_timeout_s: float, send_timeout_s: float, **keywords: Any
    ) -> None:
        """As Uvicorn makes it.

        Args:
            arguments: Uvicorn's.
            head_timeout_s: How long a head may take, in seconds.
            send_timeout_s: How long a caller may take nothing of an answer, in seconds.
            keywords: Uvicorn's.
        """
        super().__init__(*arguments, **keywords)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        #: What has come behind a request that waits for its turn.
        self._unparsed = bytearray()
        #: What is being parsed.
        self._piece = b""
        #: The request whose turn it is; Uvicorn's `cycle` is the last one that has come.
        self._running: RequestResponseCycle | None = None
        #: Whether a head has begun to come, and is not there yet.
        self._is_in_head = False
        self._is_refused = False
        self._send_timeout_s = send_timeout_s
        self._send_timer: asyncio.TimerHandle | None = None
        self._on_flushed: list[Callable[[], object]] = []
        #: Whether this process takes no more connections, and this is the last call of this one.
        self._is_leaving = False
        #: Whether the gateway has stopped, and waits for no call any more.
        self.is_ending = False

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for the first head."""
        super().connection_made(transport)
        # Then writing is paused as long as any byte is not sent. Each write is tried at once.
        transport.set_write_buffer_limits(high=0)
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parses a few heads at a time, until one waits behind another: each takes much memory."""
        while self._unparsed and not (self.pipeline or self._is_refused or self._is_closing):
            end = self._unparsed.find(HEAD_END, MIN_PARSED_BYTES)
            piece = bytes(self._unparsed if end < 0 else self._unparsed[: end + len(HEAD_END)])
            del self._unparsed[: len(piece)]
            if self._head_timer is not None:
                self._head_bytes += len(piece)
            self._piece = piece
            super().data_received(piece)
            if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, HEAD_TOO_LARGE)
        is_timed = self._head_timer or self.timeout_keep_alive_task
        if self._is_refused or self._is_closing:
            self._unparsed.clear()
        elif self._unparsed:
            self.flow.pause_reading()
        elif not is_timed and self.cycle.response_complete:
            # The rest of a body came after its answer, and Uvicorn has stopped this timer for it.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_offer(self) -> bool:
        """Whether a head offers another protocol, as Java's client does with HTTP/2."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Has a head read again without its offer; Uvicorn would lose the body."""
        offer: Any = sys.exception()
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        self._unparsed[:0] = b"\r\n".join(lines) + HEAD_END + self._piece[offer.args[0] :]

    def on_message_complete(self) -> None:
        """Has the whole request."""
        if not self._is_offer:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Goes on with what has come meanwhile."""
        super().on_response_complete()
        self._parse()

    def on_message_begin(self) -> None:
        """Starts to wait for the rest of a head."""
        super().on_message_begin()
        self._is_in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._give_up)

    def on_headers_complete(self) -> None:
        """Has the whole head."""
        if self._is_offer:
            return
        self._stop_timer()
        self._is_in_head = False
        given = next((value for name, value in self.headers if name == REQUEST_ID_HEADER), b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self}
        scope["state"]["request_id"] = request_id.decode()
        super().on_headers_complete()
        if self._is_leaving:
            self.cycle.keep_alive = False
        # Whoever answers: a route, what is around it, or Uvicorn.
        headers = self.cycle.default_headers
        self.cycle.default_headers = [*headers, (REQUEST_ID_HEADER, request_id)]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Runs a request, which sends and reads nothing on a connection that is closed."""
        self._running = cycle

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            def note_close() -> None:
                # `connection_lost` comes in a later turn of the event loop.
                cycle.disconnected = cycle.disconnected or self._is_closing

            async def receive_if_open() -> Message:
                note_close()
                return await receive()

            async def send_if_open(message: Message) -> None:
                note_close()
                await send(message)

            await app(scope, receive_if_open, send_if_open)
            note_close()

        super()._start_asgi_task(cycle, run)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        self._stop_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._flushed()

    def pause_writing(self) -> None:
        """Starts to wait for the caller to read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Has sent all of it."""
        super().resume_writing()
        self._flushed()

    def shutdown(self) -> None:
        """Gives the call that runs a while to end, and a new connection a moment to begin one."""
        self._is_leaving = True
        if self.cycle is None:
            self.loop.call_later(FIRST_CALL_S, super().shutdown)
        else:
            super().shutdown()
        self.loop.call_later(GRACE_S, self._end_call)

    @property
    def _is_closing(self) -> bool:
        return self.transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that are in our memory, because the caller does not read."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def when_flushed(self, function: Callable[[], object]) -> None:
        """Calls a function as soon as all is sent, or the connection is lost."""
        if self.flow.write_paused:
            self._on_flushed.append(function)
        else:
            function()

    def abort(self) -> None:
        """Drops the connection, and what is not sent."""
        self.transport.abort()

    def _wait_for_reader(self) -> None:
        self._send_timer = self.loop.call_later(
            self._send_timeout_s, self._abort_if_stalled, self.unsent_bytes
        )

    def _abort_if_stalled(self, unsent_bytes: int) -> None:
        if self.unsent_bytes < unsent_bytes:
            self._wait_for_reader()
            return
        logger.info("%s has read nothing for %g s: cut off", self.client, self._send_timeout_s)
        self.abort()

    def _flushed(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        functions, self._on_flushed = self._on_flushed, []
        for function in functions:
            function()

    def _end_call(self) -> None:
        self.is_ending = True
        if self.cycle is not None:
            # Whoever waits for the caller looks up.
            self.cycle.message_event.set()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._head_bytes = 0

    def _give_up(self) -> None:
        self._refuse(408, f"the request's head did not come within {self._head_timeout_s:g} s")

    def _refuse(self, status: int, text: str) -> None:
        """Closes the connection, and says why if a head has begun and no answer is under way."""
        self._stop_timer()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not self._is_in_head or is_answering or self.transport.is_closing():
            self.transport.close()
            return
        self._is_refused = True
        headers = [
            *self.server_state.default_headers,
            (REQUEST_ID_HEADER, uuid.uuid4().hex.encode()),
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + text.encode())
        self.transport.write_eof()
        # Closed with bytes unread, it would be reset, and the caller never see the answer.
        self.loop.call_later(LINGER_S, self.transport.close)


def get_connection(scope: Scope) -> Connection:
    """The connection on which a request came."""
    connection: Connection = scope["extensions"][EXTENSION]
    return connection
