"""A small HTTP port for Prometheus and for probes: `/metrics`, `/livez` and `/readyz`.

It costs nothing while nobody asks. Where the extra `metrics` is missing, its import is a
`StartError`.
"""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from batchery.errors import StartError
from batchery.fork_gate import fork_gate

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise StartError(f"metrics: pip install 'batchery[metrics]' ({error})") from error

#: How long a caller may keep its thread waiting for it, in seconds.
MAX_CALL_S = 5.0

#: Why something is not so; empty if it is.
Check = Callable[[], str]


class Port(Collector):
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
        self._collect = collect
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
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

    def collect(self) -> Iterable[Metric]:
        """The metrics, for the registry."""
        return self._collect()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            with fork_gate.working():
                made: Iterable[bytes] = self._metrics(environ, start_response)
                return made
        check = self._checks.get(path, lambda: "there is /metrics, /livez and /readyz")
        text = check()
        status = "503 Service Unavailable" if path in self._checks else "404 Not Found"
        headers = [("Content-Type", "text/plain"), ("Cache-Control", "no-store")]
        start_response(status if text else "200 OK", headers)
        return [f"{text or 'ok'}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = MAX_CALL_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's own name
        """Logs no requests."""


class _Server(ThreadingWSGIServer):
    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family, *_, address = found[0]
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        # The base class would also look its host's name up, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """A caller that hangs up is nothing to log."""
