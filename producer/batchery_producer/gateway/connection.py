"""A caller's connection: how large its heads may be, and one request at a time."""

import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

#: How long a head of a request may be, in bytes: keys and cookies are a few hundred.
MAX_HEAD_BYTES = 65_536

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
    """Bounds the heads of requests, and reads one request at a time.

    A request that comes before the answer to the one before waits for its turn. Of several that
    come together the first is read, and the connection closes behind its answer.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """As Uvicorn makes it."""
        super().__init__(*arguments, **keywords)
        #: What has come of a head, or of what comes before its turn.
        self._head = bytearray()
        #: Whether a head comes next, and no body.
        self._is_in_head = True
        self._is_refused = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that are in our memory, because the caller does not read."""
        return self.transport.get_write_buffer_size()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Has writing paused as long as any byte is not sent; each write is tried at once."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Gathers a head until it is whole, as the parser has no limit; then reads on."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head += data
            if self._is_answering:
                # The caller may have all of the answer, whose end the application has not told.
                self.flow.pause_reading()
                return
            self._unset_keepalive_if_required()
            end = self._head.find(HEAD_END)
            if (len(self._head) if end < 0 else end) > MAX_HEAD_BYTES:
                text = f"the head has more than {MAX_HEAD_BYTES} bytes; send smaller headers"
                self._refuse(431, text)
                return
            if end < 0 and not GARBAGE.match(self._head):
                return
            data = bytes(OFFER.sub(b"", self._head[:end]) + self._head[end:])
            self._head.clear()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Has the parser read one request at a time."""
        if self._is_answering:
            raise ValueError("a request came together with the one before")
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self}

    def on_headers_complete(self) -> None:
        """Goes on to the body."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Goes on to the next head."""
        super().on_message_complete()
        self._is_in_head = True

    def on_response_complete(self) -> None:
        """Goes on with what has come."""
        super().on_response_complete()
        if self._head:
            self.data_received(b"")

    def send_400_response(self, msg: str) -> None:
        """Says that a request is no HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, text: str) -> None:
        """Closes the connection and says why; behind the answer that is under way, in silence."""
        self._is_refused = True
        if self._is_answering:
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        about = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close" % len(text)
        self.transport.write(STATUS_LINE[status] + about + HEAD_END + text.encode())
        self.transport.write_eof()
        # Closed with bytes unread, it would be reset, and the caller never see the answer.
        self.loop.call_later(LINGER_S, self.transport.close)
