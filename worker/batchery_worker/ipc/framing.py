"""Frames over a socket pair: eight bytes of length, then that many bytes."""

import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from batchery.fork_gate import fork_gate

_LENGTH = struct.Struct(">Q")


class Pipe:
    """The worker's end of the pipe to one device; threads of its own read and write it.

    So whoever sends never waits for a device that reads nothing, as one that hangs.
    """

    def __init__(
        self,
        end: socket.socket,
        on_frame: Callable[["Pipe", bytes], None],
        on_end: Callable[["Pipe"], None],
    ) -> None:
        """Starts the threads.

        Args:
            end: Of a socket pair.
            on_frame: Called with each frame that has come; raises nothing.
            on_end: Called when the other end is closed, or this one.

        Raises:
            OSError: The system has no room for another thread.
        """
        self._end = end
        self._on_frame = on_frame
        self._on_end = on_end
        self._unsent: queue.Queue[bytes] = queue.Queue()
        # A child that held it open would keep the device alive when this process dies.
        fork_gate.keep_private(end)
        try:
            for work in (self._write, self._read):
                threading.Thread(target=work, daemon=True, name="batchery-pipe").start()
        except RuntimeError as error:
            self.close()
            raise OSError(str(error)) from error

    def send(self, frame: bytes) -> None:
        """Sends a frame, or drops it if the device is dead; `on_end` says so."""
        self._unsent.put(frame)

    def close(self) -> None:
        """Closes this end; the device process reads that as its order to leave."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._unsent.put(b"")

    def _write(self) -> None:
        with suppress(OSError):
            while frame := self._unsent.get():
                write_frame(self._end, frame)

    def _read(self) -> None:
        with self._end:
            with suppress(EOFError, OSError):
                while True:
                    self._on_frame(self, read_frame(self._end))
            # The other thread may wait for a device that reads nothing.
            self.close()
        self._on_end(self)


def write_frame(end: socket.socket, frame: bytes) -> None:
    """Writes one frame, blocking."""
    end.sendall(_LENGTH.pack(len(frame)) + frame)


def read_frame(end: socket.socket) -> bytes:
    """Reads one frame, blocking.

    Raises:
        EOFError: The other end is closed.
    """
    (length,) = _LENGTH.unpack(_read_exactly(end, _LENGTH.size))
    return _read_exactly(end, length)


def _read_exactly(end: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    view = memoryview(data)
    while view:
        try:
            count = end.recv_into(view)
        except ConnectionError:
            raise EOFError from None
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(data)
