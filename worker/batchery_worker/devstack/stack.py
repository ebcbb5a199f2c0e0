"""Redis, Flower, a worker and the HTTP gateway as child processes, for `batchery up`."""

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from batchery.broker_url import is_cluster
from batchery.cli.app import DEFAULT_APP, check_redis
from batchery.errors import SettingsError, StartError
from batchery.settings import Settings
from batchery_worker.devstack.guarded_process import GuardedProcess, python_command
from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port

#: Runs a worker of all the queues of its tasks.
WORKER = "batchery_worker.devstack.worker"

#: What the worker prints once it consumes, whatever its log level.
READY = "batchery up: the worker is ready"

#: How long Redis, and what never was ready, may take to end, in seconds; then it is killed. All
#: else has no limit: the worker finishes what it runs.
GRACE_S = 10.0

#: Pause between two polls of the child processes, in seconds.
POLL_S = 0.2

#: Address of what only this machine may reach.
LOOPBACK = "127.0.0.1"

#: Port of Flower, if nobody listens there.
FLOWER_PORT = 5555

#: What is not there without its extra -> the extra.
EXTRAS = {"flower": ("flower", "monitor"), "gateway": ("fastapi", "gateway")}

#: Who stops first: the gateway's callers wait for the worker, and Flower watches it to its end.
STOP_ORDER = ("gateway", "worker", "flower", "redis")

#: Where Celery looks for a broker before it looks into an app.
BROKERS = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


@dataclass
class Stack:
    """Redis, Flower, a worker, the gateway; none outlives the process that started them.

    ```python
    with Stack() as stack:
        print(stack.redis_url)
    ```

    Attributes:
        app: The Celery app, as for `celery -A`.
        redis_url: A Redis that runs already; empty for a private one, whose URL it is from its
            start on, with its password.
        flower: Whether Flower runs, if it is installed: at port 5555, or a free one.
        gateway: Whether the HTTP gateway runs, if it is installed: at the address of the settings,
            and if somebody listens there, at a free port.
        worker_arguments: Further arguments of `celery worker`.
        on_line: Called with `redis`, `worker`, `flower` or `gateway` and a line of its log, from
            threads.
        flower_url: URL of Flower; None if it does not run.
        gateway_url: URL of the gateway; None if it does not run.
        worker_name: Name of the worker, by which Flower and `celery inspect` know it.
        processes: What was started, by `redis`, `worker`, `flower` and `gateway`.
    """

    app: str = DEFAULT_APP
    _: KW_ONLY
    redis_url: str = ""
    flower: bool = False
    gateway: bool = False
    worker_arguments: Sequence[str] = ()
    on_line: Callable[[str, str], None] = lambda _name, _line: None
    flower_url: str | None = field(default=None, init=False)
    gateway_url: str | None = field(default=None, init=False)
    processes: dict[str, GuardedProcess] = field(default_factory=dict, init=False)
    _is_ready: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.worker_name = f"batchery-{secrets.token_hex(3)}@{socket.gethostname()}"

    def start(self) -> Self:
        """Starts everything and waits until everything is ready.

        Raises:
            RedisUnavailable: No Redis answers at the URL, or none can be started.
            StartError: A process ended. The `exit_code` is 2 if the worker's was 2, which means
                that the worker has logged the reason; else 1.
        """
        try:
            self._start_redis()
            if self.flower and self._is_installed("flower"):
                # Before the worker, so that it hears of each job.
                self._start_flower()
                self._wait_until(lambda: _listens(self.flower_url))
            options = ["worker", "--task-events", f"--hostname={self.worker_name}"]
            self._run("worker", WORKER, "-A", self.app, *options, *self.worker_arguments)
            worker = self.processes["worker"]
            self._wait_until(lambda: READY in worker.tail())
            # Not before: it would find that a model which takes long to load has no worker.
            if self.gateway and self._is_installed("gateway"):
                self._start_gateway()
                self._wait_until(lambda: _listens(self.gateway_url))
        except BaseException:
            self.stop()
            raise
        self._is_ready = True
        return self

    def wait(self) -> None:
        """Waits until a process ends, which none should.

        Raises:
            StartError: A process ended; as for `start`.
        """
        self._wait_until(lambda: False)

    def stop(self) -> None:
        """Stops the gateway, the worker once it has finished what it runs, then the Redis.

        A `KeyboardInterrupt` meanwhile kills them all at once, and is raised again.
        """
        # Without its Redis a worker would wait for it.
        redis = self.processes.get("redis")
        is_orderly = self._is_ready and (redis is None or redis.poll() is None)
        try:
            for name in STOP_ORDER:
                if name in self.processes:
                    self.processes[name].stop(None if is_orderly and name != "redis" else GRACE_S)
        except BaseException:
            for process in self.processes.values():
                process.kill()
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_redis(self) -> None:
        if is_cluster(self.redis_url):
            raise SettingsError(
                "a cluster needs a broker beside it; name one in CELERY_BROKER_URL, and start"
                " `celery worker` and `batchery serve` by themselves"
            )
        if self.redis_url:
            check_redis(self.redis_url)
            return
        redis = EmbeddedRedis(on_line=partial(self.on_line, "redis")).start()
        assert redis.process is not None
        self.processes["redis"], self.redis_url = redis.process, redis.url

    def _start_flower(self) -> None:
        port = free_port(LOOPBACK, FLOWER_PORT)
        options = ["flower", f"--address={LOOPBACK}", f"--port={port}"]
        # Who can reach 127.0.0.1 can also reach the Redis: a password protects nothing.
        variables = {"FLOWER_UNAUTHENTICATED_API": "true"}
        self._run("flower", "celery", "-A", self.app, *options, variables=variables)
        self.flower_url = f"http://{LOOPBACK}:{port}"

    def _start_gateway(self) -> None:
        settings = Settings.load().gateway
        host, port = settings.host, free_port(settings.host, settings.port)
        variables, folder = {}, None
        if "files" not in settings.model_fields_set and "redis" in self.processes:
            # What a private Redis knows of them goes with it.
            folder = Path(tempfile.mkdtemp(prefix="batchery-files-"))
            variables = {"BATCHERY_GATEWAY__FILES": str(folder)}
        # Another package, which this one does not import.
        options = ["serve", "-A", self.app, f"--host={host}", f"--port={port}"]
        self._run("gateway", "batchery", *options, variables=variables, remove=folder)
        shown = LOOPBACK if host in ("0.0.0.0", "::", "") else host
        self.gateway_url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"

    def _is_installed(self, name: str) -> bool:
        module, extra = EXTRAS[name]
        if importlib.util.find_spec(module) is None:
            self.on_line(name, f'not installed: `pip install "batchery[{extra}]"` adds it')
            return False
        return True

    def _run(
        self,
        name: str,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        remove: Path | None = None,
    ) -> None:
        # They outrank the app's code. A default app's results may be kept elsewhere.
        backend = () if self.app == DEFAULT_APP else ("CELERY_RESULT_BACKEND",)
        self.processes[name] = GuardedProcess(
            [*python_command(), "-m", module, *arguments],
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                **(variables or {}),
                **dict.fromkeys((*BROKERS, "BATCHERY_REDIS_URL", *backend), self.redis_url),
            },
            remove=remove,
            on_line=partial(self.on_line, name),
        )

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            self._check_alive()
            time.sleep(POLL_S)

    def _check_alive(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise _ended(name, process.wait(), process.tail())


def _listens(url: str | None) -> bool:
    """Whether somebody listens at a URL."""
    address = urlsplit(url or "")
    with contextlib.suppress(OSError), socket.create_connection((address.hostname, address.port)):
        return True
    return False


def _ended(name: str, code: int, log: str) -> StartError:
    """The error that a process has ended; codes below 0 are signals."""
    how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
    last_words = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    error = StartError(f"{name} ended with {how}: {last_words}")
    error.exit_code = 2 if name == "worker" and code == 2 else 1
    return error
