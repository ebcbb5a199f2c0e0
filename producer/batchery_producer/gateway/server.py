"""Runs the gateway: one process, or several side by side on one socket."""

import asyncio
import logging
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import uvicorn
from celery import Celery
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from batchery.cli.app import load_app
from batchery.cli.main import one_line_errors
from batchery.errors import SettingsError, StartError
from batchery.gateway_settings import GatewaySettings, is_loopback
from batchery.settings import Settings
from batchery_producer.gateway.app import make_app
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.connection import GRACE_S, Connection
from batchery_producer.gateway.jobs import app_settings, end_with_parent, worker_beside

logger = logging.getLogger("uvicorn.error")

#: How long a connection without requests is kept, in seconds: longer than the pools of clients and
#: proxies, which would otherwise send into a connection that we close.
KEEP_ALIVE_S = 75

#: Connections that the kernel holds for us: as many as come at once.
BACKLOG = 4096

#: Seconds that calls which were ended at a stop have to send why, before their tasks are cancelled.
LAST_WORDS_S = 5

#: Number of looks, two a second, after which a process that does not answer is replaced. The parent
#: counts its own looks, because on a machine that stands still both of them do.
STUCK_LOOKS = 240

#: After how long a process that found a mistake as it started is tried again, in seconds.
START_AGAIN_S = 10.0


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

    def settings(self, *, anew: bool = False) -> Settings:
        """The settings of the app, with what the command line says.

        Raises:
            StartError: The app cannot be imported, or a setting is wrong.
        """
        found = app_settings(self.load(), anew=anew)
        given = {"host": self.host, "port": self.port, "processes": self.processes}
        known = {name: value for name, value in given.items() if value is not None}
        gateway = found.gateway.model_copy(update=known)
        return found.model_copy(update={"gateway": gateway})


def application(
    options: ServeOptions, replace_worker: Callable[[], None] = lambda: None
) -> FastAPI:
    """The application of one process, which takes up new keys at SIGHUP.

    Args:
        options: What the command line says.
        replace_worker: Has the worker beside read the settings, too.

    Raises:
        AppNotImportable: One of the modules of its tasks cannot be imported.
    """
    threading.Thread(target=end_with_parent, args=(options.metrics_folder,), daemon=True).start()
    app = options.load(with_tasks=True)
    web = make_app(app, options.settings(), options.metrics_folder)

    def take_up_keys() -> None:
        settings = read_anew(options)
        if settings is not None:
            web.state.callers.read(settings)
            logger.info("SIGHUP: there are %d keys", len(settings.gateway.keys))
            replace_worker()

    if not os.isatty(0):  # As Celery's worker: the end of a terminal ends what runs in it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, take_up_keys)
    return web


@one_line_errors()
def one_of_several(options: ServeOptions) -> FastAPI:
    """As `application`, in a process of its own, which ends with one line where it cannot start."""
    return application(options)


def read_anew(options: ServeOptions) -> Settings | None:
    """The settings as they are now; None if they cannot be taken up, which is logged."""
    try:
        settings = options.settings(anew=True)
        check_host(settings.gateway)
        Callers(settings)
    except StartError as error:
        logger.error("SIGHUP: nothing changes: %s", error)
        return None
    return settings


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
    beside = worker_beside(load) if gateway.worker else nullcontext(lambda: None)
    with sock, beside as replace_worker:
        if gateway.processes == 1:
            config = configuration(partial(application, options, replace_worker), options, gateway)
            uvicorn.Server(config).run(sockets=[sock])
            return
        with metrics_folder() as folder:
            options = replace(options, metrics_folder=folder)
            config = configuration(partial(one_of_several, options), options, gateway)
            processes = Processes(config, [sock], options, replace_worker)
            processes.run()
            if processes.cannot_start:
                raise StartError("a process of the gateway cannot start; see what it said above")


def configuration(
    make: Callable[[], FastAPI], options: ServeOptions, gateway: GatewaySettings
) -> uvicorn.Config:
    """What uvicorn runs, and how."""
    return uvicorn.Config(
        make,
        factory=True,
        http=partial(  # type: ignore[arg-type]
            Connection,
            head_timeout_s=gateway.body_timeout_s,
            send_timeout_s=gateway.send_timeout_s,
        ),
        loop="uvloop",
        ws="none",
        lifespan="on",
        workers=gateway.processes,
        access_log=options.access_log,
        log_level="info",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_worker_healthcheck=STUCK_LOOKS // 2,
        timeout_graceful_shutdown=GRACE_S + LAST_WORDS_S,
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

    def __init__(
        self,
        config: uvicorn.Config,
        sockets: list[socket.socket],
        options: ServeOptions,
        replace_worker: Callable[[], None],
    ) -> None:
        super().__init__(config, sockets)
        self._options = options
        self._replace_worker = replace_worker
        #: Whether the gateway stops because a process could not start.
        self.cannot_start = False
        self._has_served = False
        self._retry_s = 0.0
        #: Looks since a process was asked whether it lives, and has not answered; by its id.
        self._unanswered: dict[int | None, int] = {}

    def keep_subprocess_alive(self) -> None:
        """Starts others for those that have died or are stuck; waits for none of them.

        Uvicorn's own replaces a process that is slower than a few seconds, though it works.
        """
        for index, process in enumerate(self.processes):
            if self.should_exit.is_set():
                return
            if process.process.is_alive() and not self._is_stuck(process):
                continue
            found_mistake = process.exitcode == StartError.exit_code
            if found_mistake and self._has_served:
                # The others go on until somebody has mended it.
                if time.monotonic() < self._retry_s:
                    continue
                self._retry_s = time.monotonic() + START_AGAIN_S
            process.kill()
            process.join()
            self._unanswered.pop(process.pid, None)
            folder = self._options.metrics_folder
            mark_process_dead(process.pid, folder)  # type: ignore[no-untyped-call]
            if process.exitcode == STARTUP_FAILURE or (found_mistake and not self._has_served):
                logger.error("process %s cannot start, so the gateway stops", process.pid)
                self.cannot_start = True
                self.should_exit.set()
                return
            logger.warning("process %s ended (%s): replaced", process.pid, process.exitcode)
            self.processes[index] = Process(self.config, self.sockets)
            self.processes[index].start()

    def handle_hup(self) -> None:
        """Has others take the place of all processes, one after the other, with new settings.

        Nothing ends before somebody can take its place, the worker beside last.
        """
        if read_anew(self._options) is None:
            return
        before = set(self.processes)
        super().handle_hup()
        if before.isdisjoint(self.processes):
            self._replace_worker()

    def _is_stuck(self, process: Process) -> bool:
        """Asks a process whether it lives, unless it owes an answer."""
        with suppress(OSError, EOFError):  # It is ending, and then `is_alive` says so.
            while process.parent_conn.poll():
                self._has_served |= process.parent_conn.recv()
                self._unanswered.pop(process.pid, None)
            if process.pid not in self._unanswered:
                process.parent_conn.send(b"ping")
        looks = self._unanswered[process.pid] = self._unanswered.get(process.pid, 0) + 1
        return looks > STUCK_LOOKS


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


def _format(host: str) -> str:
    return f"[{host}]" if ":" in host else host
