"""Runs the gateway: one process, or several side by side on one socket."""

import asyncio
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from batchery.cli.app import load_app
from batchery.errors import AppNotImportable, SettingsError, StartError
from batchery.gateway_settings import GatewaySettings
from batchery.installation import installation_of
from batchery.settings import Settings
from batchery_producer.gateway.app import make_app
from batchery_producer.gateway.guard import is_loopback

#: How long a connection without requests is kept, in seconds: longer than the pools of clients and
#: proxies, which would otherwise send into a connection that we close.
KEEP_ALIVE_S = 75

#: Connections that the kernel holds for us: as many as come at once.
BACKLOG = 4096

#: How long requests may go on after a stop, in seconds.
GRACE_S = 30

#: How long a head of a request may be, in bytes: keys and cookies are a few hundred.
MAX_HEAD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a command line says; each process makes its application of it.

    Attributes:
        app_path: The Celery app, as for `celery -A`.
        redis_url: Redis of the default app; None for that of the settings.
        host: Address; None for that of the settings.
        port: Port; None for that of the settings.
        processes: Number of processes; None for that of the settings.
        access_log: Whether each request is logged.
        metrics_folder: Where the processes share their metrics; None for one process.
    """

    app_path: str
    redis_url: str | None = None
    host: str | None = None
    port: int | None = None
    processes: int | None = None
    access_log: bool = False
    metrics_folder: str | None = None

    def settings(self) -> Settings:
        """The settings of the app, with what the command line says.

        Raises:
            StartError: The app cannot be imported, or a setting is wrong.
        """
        found = settings_of(self.app_path, self.redis_url)
        given = {"host": self.host, "port": self.port, "processes": self.processes}
        known = {name: value for name, value in given.items() if value is not None}
        gateway = found.gateway.model_copy(update=known)
        return found.model_copy(update={"gateway": gateway})


def settings_of(app_path: str, redis_url: str | None) -> Settings:
    """The settings of an app; those of the environment and the file if `install` was not called."""
    app = load_app(app_path, redis_url)
    try:
        return installation_of(app).settings
    except SettingsError:
        return Settings.load(app.conf)


def application(options: ServeOptions) -> FastAPI:
    """The application of one process.

    Raises:
        AppNotImportable: One of the modules of its tasks cannot be imported.
    """
    threading.Thread(target=end_with_parent, args=(options.metrics_folder,), daemon=True).start()
    load = partial(load_app, options.app_path, options.redis_url)
    app: Any = load()
    try:
        # As a worker does: where a task goes is said in its code.
        app.loader.import_default_modules()
    except Exception as error:
        raise AppNotImportable(
            f"app {options.app_path!r}: its tasks cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    return make_app(app, options.settings(), load, options.metrics_folder)


def serve(options: ServeOptions) -> None:
    """Serves until a signal comes.

    Raises:
        StartError: It cannot listen there, or must not.
    """
    gateway = options.settings().gateway
    check_host(gateway)
    sock = listen(gateway.host, gateway.port)
    allow_many_files()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn stops in order, and raises the signal again.
        signal.signal(number, _end)
    url = f"http://{_spelled(gateway.host)}:{sock.getsockname()[1]}"
    print(f"batchery serve: {url}", flush=True)  # noqa: T201 - what its caller waits for
    with sock:
        if gateway.processes == 1:
            uvicorn.Server(configuration(options, gateway)).run(sockets=[sock])
            return
        with metrics_folder() as folder:
            config = configuration(replace(options, metrics_folder=folder), gateway)
            Processes(config, [sock], folder).run()


def configuration(options: ServeOptions, gateway: GatewaySettings) -> uvicorn.Config:
    """What uvicorn runs, and how."""
    return uvicorn.Config(
        partial(application, options),
        factory=True,
        http=partial(Connection, head_timeout_s=gateway.body_timeout_s),  # type: ignore[arg-type]
        loop="uvloop",
        ws="none",
        lifespan="on",
        workers=gateway.processes,
        access_log=options.access_log,
        log_level="info",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )


@contextmanager
def metrics_folder() -> Iterator[str]:
    """A folder in which the processes that are started meanwhile share their metrics."""
    with tempfile.TemporaryDirectory(prefix="batchery-metrics-") as folder:
        # prometheus_client looks for it when it is imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield folder


class Processes(Multiprocess):
    """Several processes; what is counted of the present goes with the one that it was about."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], folder: str) -> None:
        super().__init__(config, sockets)
        self._folder = folder

    def keep_subprocess_alive(self) -> None:
        """Starts others for those that have died."""
        before = [process.pid for process in self.processes]
        super().keep_subprocess_alive()
        for pid in set(before) - {process.pid for process in self.processes}:
            mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]


def _end(*_: object) -> None:
    raise SystemExit(0)


def check_host(gateway: GatewaySettings) -> None:
    """Keeps a gateway without keys from the network.

    Raises:
        SettingsError: It would be open to it.
    """
    if not gateway.keys and not is_loopback(gateway.host):
        raise SettingsError(
            f"gateway.host = {gateway.host!r} is open to the network, and there are no API keys;"
            " make one by `batchery key NAME`, or listen on 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        StartError: The address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def allow_many_files() -> None:
    """Allows as many connections as the system has for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _spelled(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Connection(HttpToolsProtocol):
    """A connection that is closed if no head of a request comes in time, or a head without end."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **keywords: Any) -> None:
        """As Uvicorn makes it; `head_timeout_s` is how long a head may take, in seconds."""
        super().__init__(*arguments, **keywords)
        self._head_timeout_s = head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for the first head."""
        super().connection_made(transport)
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
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._head_bytes = 0

    def _close_idle(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()


def end_with_parent(metrics_folder: str | None) -> None:
    """Ends this process when the one that started it has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if metrics_folder is not None:
            # It is still there if the parent was killed.
            shutil.rmtree(metrics_folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
