"""A caller's connection: how long its head may take, and what becomes of answers nobody reads."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger("uvicorn.error")

#: How long a head of a request may be, in bytes: keys and cookies are a few hundred.
MAX_HEAD_BYTES = 65_536

#: How long requests may go on after a stop, in seconds.
GRACE_S = 25

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
        self._send_timeout_s = send_timeout_s
        self._send_timer: asyncio.TimerHandle | None = None
        self._on_flushed: list[Callable[[], object]] = []
        #: Whether the gateway has stopped, and waits for no call any more.
        self.is_ending = False

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for the first head."""
        super().connection_made(transport)
        # Then writing is paused as long as any byte is not sent. Each write is tried at once.
        transport.set_write_buffer_limits(high=0)
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_idle)

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._close_idle()

    def on_message_begin(self) -> None:
        """Starts to wait for the rest of a head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._close_idle)

    def on_headers_complete(self) -> None:
        """Has the whole head."""
        self._stop_timer()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self}
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        self._stop_timer()
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
        """Gives the call that runs a while to end."""
        super().shutdown()
        self.loop.call_later(GRACE_S, self._end_call)

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

    def _close_idle(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


def get_connection(scope: Scope) -> Connection:
    """The connection on which a request came."""
    connection: Connection = scope["extensions"][EXTENSION]
    return connection
