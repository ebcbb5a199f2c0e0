"""A small HTTP port for Prometheus and for probes: `/metrics`, `/livez` and `/readyz`.

It costs nothing while nobody asks. Nobody who asks can hold others up: a request is small, what
sends or reads it slowly is cut off, and there are few at once.
"""

import io
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from time import monotonic
from typing import Any

from batchery.errors import StartError
from batchery.fork_gate import fork_gate

logger = logging.getLogger(__name__)

#: Maximum length of the head of a request, in bytes; none has a body.
MAX_HEAD_BYTES = 8192

#: How long a caller may take to send a request, and then to read the answer, in seconds.
MAX_CALL_S = 5.0

#: Maximum number of callers at once; whoever comes then is cut off.
MAX_CALLS = 16

#: Text and media type of the metrics, for a caller that reads the formats of its `Accept` header.
Encode = Callable[[str], tuple[bytes, str]]

#: Why something is not so; empty if it is.
Check = Callable[[], str]


class Port(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers from threads of its own; `close` it in the process that has made it."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CALLS

    def __init__(self, host: str, port: int, encode: Encode, live: Check, ready: Check) -> None:
        """Listens, and answers nobody yet.

        Args:
            host: Address to listen on.
            port: 0 is any free one.
            encode: Makes the answer of `/metrics`; called from several threads.
            live: Why `/livez` is 503; the same.
            ready: Why `/readyz` is 503; the same.

        Raises:
            StartError: The address is taken, or is none of this machine.
        """
        self.encode = encode
        self.checks = {"/livez": live, "/readyz": ready}
        self._calls = threading.BoundedSemaphore(MAX_CALLS)
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__(address, _Call)  # type: ignore[arg-type]
        except OSError as error:
            raise StartError(
                f"metrics: cannot listen on {host}:{port}: {error.strerror};"
                " give each process a port of its own"
            ) from error
        # A child that held it open would answer for a parent that has ended.
        fork_gate.keep_private(self)

    @property
    def url(self) -> str:
        """Where it is, for people."""
        host, port = map(str, self.server_address[:2])
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Answers from now on."""
        threading.Thread(target=self._serve, name="batchery-port", daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        self.server_close()

    def _serve(self) -> None:
        # Unlike `serve_forever`, this does not wake up twice a second to see whether it must end.
        while self.fileno() >= 0:
            try:
                self.handle_request()
            except (OSError, ValueError) as error:
                logger.debug("the port is closed: %r", error)
                return

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread of its own, if there are not too many."""
        if not self._calls.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started. The base class hangs up.
            self._calls.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What that thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._calls.release()

    def handle_error(self, *_: Any) -> None:
        """A caller that hangs up is nothing to log."""
        logger.debug("a call of the metrics has failed: %r", sys.exception())


class _Call(BaseHTTPRequestHandler):
    """One request, and its connection."""

    server: Port
    server_version, sys_version = "batchery", ""

    def setup(self) -> None:
        """Reads the head at once, as far as it may go."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._read_head())
        # As long as all of the answer may take.
        self.connection.settimeout(MAX_CALL_S)

    def _read_head(self) -> bytes:
        """The head of the request; nothing if it has no end, which closes the connection."""
        end_s, head = monotonic() + MAX_CALL_S, b""
        while b"\r\n\r\n" not in head:
            self.connection.settimeout(max(0.001, end_s - monotonic()))
            received = self.connection.recv(MAX_HEAD_BYTES - len(head))
            if not received:
                return b""
            head += received
        return head

    def do_GET(self) -> None:
        """Answers."""
        path = self.path.partition("?")[0]
        check = self.server.checks.get(path)
        if path == "/metrics":
            try:
                with fork_gate.working():
                    body, media_type = self.server.encode(self.headers.get("Accept", ""))
            except Exception:
                logger.exception("the metrics cannot be written")
                self._answer(500, b"the log says why\n")
            else:
                self._answer(200, body, media_type)
        elif check is not None:
            problem = check()
            self._answer(503 if problem else 200, f"{problem or 'ok'}\n".encode())
        else:
            self._answer(404, b"there is /metrics, /livez and /readyz\n")

    def _answer(self, status: int, body: bytes, media_type: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's own name
        """Logs no requests."""
