"""Runs the gateway: one process, or several side by side on one socket."""

import os
import resource
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import uvicorn
from celery import Celery
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.supervisors import Multiprocess

from batchery.cli.app import load_app
from batchery.errors import SettingsError, StartError
from batchery.gateway_settings import GatewaySettings, is_loopback
from batchery.settings import Settings
from batchery_producer.gateway.app import make_app
from batchery_producer.gateway.connection import Connection
from batchery_producer.gateway.jobs import app_settings, end_with_parent, worker_beside

#: How long a connection without requests is kept, in seconds: longer than the pools of clients and
#: proxies, which would otherwise send into a connection that we close.
KEEP_ALIVE_S = 75

#: Connections that the kernel holds for us: as many as come at once.
BACKLOG = 4096

#: How long requests may go on after a stop, in seconds.
GRACE_S = 25

#: How long a process may take to answer its parent, in seconds, before another takes its place.
STUCK_S = 30


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

    def load(self, *, with_tasks: bool = False) -> Celery:
        """The app; its tasks are as a worker has them: where one goes is said in its code.

        Raises:
            StartError: It cannot be imported, or a module of its tasks, or a setting is wrong.
        """
        return load_app(self.app_path, self.redis_url, with_tasks=with_tasks)

    def settings(self) -> Settings:
        """The settings of the app, with what the command line says.

        Raises:
            StartError: The app cannot be imported, or a setting is wrong.
        """
        found = app_settings(self.load())
        given = {"host": self.host, "port": self.port, "processes": self.processes}
        known = {name: value for name, value in given.items() if value is not None}
        gateway = found.gateway.model_copy(update=known)
        return found.model_copy(update={"gateway": gateway})


def application(options: ServeOptions) -> FastAPI:
    """The application of one process.

    Raises:
        AppNotImportable: One of the modules of its tasks cannot be imported.
    """
    threading.Thread(target=end_with_parent, args=(options.metrics_folder,), daemon=True).start()
    app = options.load(with_tasks=True)
    return make_app(app, options.settings(), options.metrics_folder)


def serve(options: ServeOptions) -> None:
    """Serves until a signal comes.

    Raises:
        StartError: It cannot listen there, or must not, or its processes cannot start.
    """
    gateway = options.settings().gateway
    check_host(gateway)
    sock = listen(gateway.host, gateway.port)
    allow_many_files()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn stops in order, and raises the signal again.
        signal.signal(number, _end)
    url = f"http://{_format(gateway.host)}:{sock.getsockname()[1]}"
    print(f"batchery serve: {url}", flush=True)  # noqa: T201 - what its caller waits for
    load = partial(options.load, with_tasks=True)
    if gateway.processes > 1:
        # A mistake is found once, before there are processes.
        make_app(load(), options.settings())
    with sock, worker_beside(load) if gateway.worker else nullcontext():
        if gateway.processes == 1:
            config = configuration(partial(application, options), options, gateway)
            uvicorn.Server(config).run(sockets=[sock])
            return
        with metrics_folder() as folder:
            options = replace(options, metrics_folder=folder)
            config = configuration(partial(application, options), options, gateway)
            Processes(config, [sock], folder).run()


def configuration(
    make: Callable[[], FastAPI], options: ServeOptions, gateway: GatewaySettings
) -> uvicorn.Config:
    """What uvicorn runs, and how."""
    return uvicorn.Config(
        make,
        factory=True,
        http=Connection,
        loop="uvloop",
        ws="none",
        lifespan="on",
        workers=gateway.processes,
        access_log=options.access_log,
        log_level="info",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_worker_healthcheck=STUCK_S,
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
    """Uvicorn's processes, which share their metrics."""

    def __init__(
        self, config: uvicorn.Config, sockets: list[socket.socket], metrics_folder: str
    ) -> None:
        super().__init__(config, sockets)
        self._metrics_folder = metrics_folder

    def keep_subprocess_alive(self) -> None:
        """Replaces those that have died; what they counted of the present goes with them."""
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            mark_process_dead(pid, self._metrics_folder)  # type: ignore[no-untyped-call]

    def handle_hup(self) -> None:
        """Stops, as the end of a terminal ends what runs in it."""
        self.should_exit.set()


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def allow_many_files() -> None:
    """Allows as many connections as the system has for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _format(host: str) -> str:
    return f"[{host}]" if ":" in host else host
