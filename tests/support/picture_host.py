"""A server of pictures, and of what a hostile one may answer instead."""

import gzip
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

#: Where some of its paths lead.
REDIRECTS = {
    "/redirect": "/picture",
    "/loop": "/loop",
    "/redirect-elsewhere": "http://127.0.0.2/x",
    "/redirect-file": "file:///etc/passwd",
}


#: A small file that unpacks to a large one.
ZIP_BOMB = gzip.compress(bytes(500_000))


class PictureHost:
    """An HTTP server on loopback, which ends with its block."""

    def __init__(self, picture: bytes) -> None:
        """Starts it; `picture` is what `/picture` answers."""
        self.picture = picture
        #: Set, it lets go of those who ask for `/slow`; and how many have.
        self.gate, self.slow = threading.Event(), 0
        handler = type("Handler", (_Handler,), {"host": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The URL of a path."""
        return f"http://{host}:{self._server.server_port}{path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    host: PictureHost

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/slow":
            self.host.slow += 1
            self.host.gate.wait()
        if path in ("/picture", "/slow"):
            self._answer(200, self.host.picture)
        elif path == "/zip-bomb":
            self._answer(200, ZIP_BOMB, len(ZIP_BOMB), **{"Content-Encoding": "gzip"})
        elif path in REDIRECTS:
            self._answer(302, Location=REDIRECTS[path])
        elif path == "/large":
            self._answer(200, length=10**12)
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))
        else:
            self._answer(404)

    def _answer(
        self, status: int, body: bytes = b"", length: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)
