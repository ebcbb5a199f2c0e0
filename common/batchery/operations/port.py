"""A small HTTP port for Prometheus and for probes: `/metrics`, `/livez` and `/readyz`.

It costs nothing while nobody asks.
"""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchery.errors import StartError
from batchery.fork_gate import fork_gate

#: How long a caller may keep its thread waiting for it, in seconds.
MAX_CALL_S = 5.0

#: Why something is not so; empty if it is.
Check = Callable[[], str]


class Port:
    """Answers from threads of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        collect: Callable[[], Iterable[Metric]],
        live: Check,
        ready: Check,
    ) -> None:
        """Listens, and answers nobody yet.

        Args:
            host: Address to listen on.
            port: 0 is any free one.
            collect: Makes the metrics; called from several threads.
            live: Why `/livez` is 503; the same.
            ready: Why `/readyz` is 503; the same.

        Raises:
            StartError: The address is taken, or is none of this machine.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(collect))
        self._metrics: Any = make_wsgi_app(registry)
        self._checks = {"/livez": live, "/readyz": ready}
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise StartError(
                f"metrics: cannot listen on {host}:{port}: {error.strerror};"
                " give each process a port of its own"
            ) from error
        self._server.set_app(self._answer)
        # A child that held it open would answer for a parent that has ended.
        fork_gate.keep_private(self)

    @property
    def url(self) -> str:
        """Where it is, for people."""
        host, port = map(str, self._server.server_address[:2])
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Answers from now on, until the process ends."""
        # Nobody shuts it down, so it need not wake up to see whether somebody has.
        serve = threading.Thread(target=self._server.serve_forever, args=(3600,), daemon=True)
        serve.start()

    def close(self) -> None:
        """Listens no more."""
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            with fork_gate.working():
                made: Iterable[bytes] = self._metrics(environ, start_response)
                return made
        check = self._checks.get(path)
        if check is None:
            status, text = "404 Not Found", "there is /metrics, /livez and /readyz"
        elif text := check():
            status = "503 Service Unavailable"
        else:
            status, text = "200 OK", "ok"
        start_response(status, [("Content-Type", "text/plain"), ("Cache-Control", "no-store")])
        return [f"{text}\n".encode()]


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class _Handler(WSGIRequestHandler):
    timeout = MAX_CALL_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's own name
        """Logs no requests."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        # The base class would also look its host's name up, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """A caller that hangs up is nothing to log."""
