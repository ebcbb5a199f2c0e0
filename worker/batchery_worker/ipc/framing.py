"""Frames over a socket pair: eight bytes of length, then that many bytes.

The parent's end never blocks. The device's end blocks threads that have nothing else to do.
"""

import socket
import struct
from collections import deque
from itertools import islice

_LENGTH = struct.Struct(">Q")

#: Number of bytes that are read at once: enough for a full batch of short texts.
_CHUNK_BYTES = 1 << 18

#: Number of parts (lengths and frames) that are written at once; every system allows more.
_MAX_PARTS = 16


class Link:
    """The parent's end of the pipe to one device process."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._reading = end
        # An event loop cannot hold one descriptor twice, as reader and as writer.
        self._writing = end.dup()
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    @property
    def reader(self) -> int:
        """Descriptor that becomes readable when `receive` has something to return."""
        return self._reading.fileno()

    @property
    def writer(self) -> int:
        """Descriptor that becomes writable when `flush` can go on."""
        return self._writing.fileno()

    def send(self, frame: bytes) -> bool:
        """Queues a frame and writes what fits; returns as `flush` does."""
        self._unsent.append(memoryview(_LENGTH.pack(len(frame))))
        self._unsent.append(memoryview(frame))
        return self.flush()

    def flush(self) -> bool:
        """Writes as much as the pipe takes; returns whether nothing is left to write.

        Frames for a dead process are dropped: `receive` learns of the death by the end of file.
        """
        try:
            while self._unsent:
                # Length and frame go together, or the device would wake up for the length alone.
                sent = self._writing.sendmsg(list(islice(self._unsent, _MAX_PARTS)))
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if sent:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    def receive(self) -> list[bytes]:
        """Reads all complete frames that have arrived.

        Raises:
            EOFError: The other end is closed, and every complete frame has been returned.
        """
        closed = False
        try:
            while chunk := self._reading.recv(_CHUNK_BYTES):
                self._received += chunk
                if len(chunk) < _CHUNK_BYTES:
                    break
            else:
                closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        frames = self._complete_frames()
        if closed and not frames:
            raise EOFError
        return frames

    def _complete_frames(self) -> list[bytes]:
        frames = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            frames.append(bytes(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        return frames

    def close(self) -> None:
        """Closes this end; the device process reads that as its order to leave."""
        self._reading.close()
        self._writing.close()


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
