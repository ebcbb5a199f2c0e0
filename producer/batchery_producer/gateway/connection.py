"""A caller's connection: how large and how slow its heads may be, and its reading of answers."""

import asyncio
import re
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

#: How long a head of a request may be, in bytes: keys and cookies are a few hundred.
MAX_HEAD_BYTES = 65_536

#: Maximum bytes of a request that comes before the answer to the one before has ended: as many as
#: come before the connection is no longer read, and more.
MAX_EARLY_BYTES = 1 << 20

#: What ends a head, and what cannot begin one.
HEAD_END = b"\r\n\r\n"
GARBAGE = re.compile(rb"\s*[^\sA-Za-z]")

#: A protocol that a head offers, as Java's client does with HTTP/2. None is served, and the parser
#: would leave the body unread for it.
OFFER = re.compile(rb"\r\nupgrade:[^\r]*", re.IGNORECASE)

#: How long a caller has to read why a head was refused, in seconds.
LINGER_S = 1

#: Extension of the ASGI scope under which a request finds its connection.
EXTENSION = "batchery.connection"


class Connection(HttpToolsProtocol):
    """Closes if a head does not come in time, or an answer is not read.

    A request that comes before the answer to the one before waits for its turn. Of several that
    come together the first is read, and the connection closes behind its answer.
    """

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
        self._head_timeout_s, self._send_timeout_s = head_timeout_s, send_timeout_s
        #: What has come of a head; None while a body comes.
        self._head: bytearray | None = bytearray()
        self._is_refused = False
        #: Whether the parser has a part of a head, which is not gathered.
        self._is_torn = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that are in our memory, because the caller does not read."""
        return self.transport.get_write_buffer_size()

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for the first head."""
        super().connection_made(transport)
        # Then writing is paused as long as any byte is not sent. Each write is tried at once.
        transport.set_write_buffer_limits(high=0)
        self._wait_for_caller()

    def data_received(self, data: bytes) -> None:
        """Gathers a head until it is whole, as the parser has no limit; then reads on."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._head is None:
            super().data_received(data)
            if self._is_torn:
                self.transport.close()
        elif self._is_answering:
            # The caller may have all of the answer, of which the application does not know the end.
            self._head += data
            self.flow.pause_reading()
            if len(self._head) > MAX_EARLY_BYTES:
                self._end_behind_answer()
        else:
            self._unset_keepalive_if_required()
            if self._head_timer is None:
                self._wait_for_caller()
            start = max(len(self._head) - len(HEAD_END), 0)
            self._head += data
            end = self._head.find(HEAD_END, start)
            if max(end, len(self._head) if end < 0 else 0) > MAX_HEAD_BYTES:
                text = f"the head has more than {MAX_HEAD_BYTES} bytes; send smaller headers"
                self._refuse(431, text)
            elif end >= 0 or GARBAGE.match(self._head):
                whole, self._head = self._head, None
                self._stop_head_timer()
                super().data_received(bytes(OFFER.sub(b"", whole[:end]) + whole[end:]))

    def on_message_begin(self) -> None:
        """Has the parser read one request at a time."""
        if self._head is not None:
            if self._is_answering:
                raise ValueError("a request came before the answer to the one before")
            # It came with the end of a body that nobody wanted.
            self._head, self._is_torn = None, True
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self}

    def on_headers_complete(self) -> None:
        """Has the whole head."""
        self._is_torn = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Has the whole request."""
        super().on_message_complete()
        self._head = bytearray()
        if not self._is_answering:
            self._wait_for_caller()

    def on_response_complete(self) -> None:
        """Goes on with what has come, or waits for the rest of a body that nobody wants."""
        super().on_response_complete()
        if self._head is None:
            self._wait_for_caller()
        elif self._head:
            early, self._head = bytes(self._head), bytearray()
            self.data_received(early)

    def send_400_response(self, msg: str) -> None:
        """Says that a request is no HTTP, unless an answer to another one is under way."""
        if self._head is not None and self._is_answering:
            self._end_behind_answer()
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_send_timer()

    def pause_writing(self) -> None:
        """Starts to wait for the caller to read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Has sent all of it."""
        super().resume_writing()
        self._stop_send_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_behind_answer(self) -> None:
        self.cycle.keep_alive = False
        self.flow.pause_reading()

    def _wait_for_reader(self) -> None:
        self._send_timer = self.loop.call_later(
            self._send_timeout_s, self._abort_if_stalled, self.unsent_bytes
        )

    def _abort_if_stalled(self, unsent_bytes: int) -> None:
        if self.unsent_bytes < unsent_bytes:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _wait_for_caller(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()

    def _give_up(self) -> None:
        if self._head:
            self._refuse(408, f"the head did not come within {self._head_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str) -> None:
        """Closes the connection, and says why."""
        self._is_refused = True
        self._stop_head_timer()
        about = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close" % len(text)
        self.transport.write(STATUS_LINE[status] + about + HEAD_END + text.encode())
        self.transport.write_eof()
        # Closed with bytes unread, it would be reset, and the caller never see the answer.
        self.loop.call_later(LINGER_S, self.transport.close)


def get_connection(scope: Scope) -> Connection:
    """The connection on which a request came."""
    connection: Connection = scope["extensions"][EXTENSION]
    return connection
