"""A TCP proxy on this machine whose connections can be cut, and whose target can move."""

import contextlib
import socket
import threading
from typing import Self

#: Bytes passed on at a time.
CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on a port of its own for as long as it is open; the server behind may come and go."""

    def __init__(self, target: int) -> None:
        """Opens the proxy.

        Args:
            target: Port on 127.0.0.1 that connections are passed on to; may be changed at any time.
        """
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: Port that it listens on.
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> int:
        """Cuts every connection; returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut(*pair)
        return len(pairs)

    def close(self) -> None:
        """Cuts every connection and takes no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._connect(near)

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = (near, far)
        with self._lock:
            self._pairs.append(pair)
        for source, sink in (pair, pair[::-1]):
            threading.Thread(target=self._pump, args=(source, sink, pair), daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                sink.sendall(data)
        # Whoever ends, both ends are done; the other thread wakes up and finds the same.
        with self._lock:
            if pair in self._pairs:
                self._pairs.remove(pair)
        _shut(*pair)


def _shut(*ends: socket.socket) -> None:
    """Ends a connection, also for a thread that reads from it."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
