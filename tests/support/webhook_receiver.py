"""A real HTTP server that receives webhooks."""

import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self


class Received(NamedTuple):
    """A request that came."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class WebhookReceiver:
    """Listens on loopback; answers with each of its statuses in turn, then with the last."""

    def __init__(self, *statuses: int, tls: ssl.SSLContext | None = None) -> None:
        #: In the order in which they came.
        self.received: list[Received] = []
        remaining = list(statuses or (200,))
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append(Received(self.path, dict(self.headers), body))
                self.send_response(remaining.pop(0) if len(remaining) > 1 else remaining[0])
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
