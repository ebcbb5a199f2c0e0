"""Redis, a worker, Flower and the HTTP gateway as child processes, for `batchery up`."""

import importlib.util
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from batchery.cli.app import DEFAULT_APP, check_redis
from batchery.errors import StartError
from batchery.settings import Settings
from batchery.valkey import redis_url as as_redis
from batchery_worker.devstack.guarded_process import GuardedProcess, python_command
from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port

#: Runs a worker of all the queues of its tasks.
WORKER = "batchery_worker.devstack.worker"

#: What the worker prints once it consumes, whatever its log level.
READY = "batchery up: the worker is ready"

#: How long Flower and the gateway may take for one answer, in seconds.
HTTP_TIMEOUT_S = 2.0

#: How long what never was ready may take to end, in seconds; then it is killed. All else has no
#: limit: the worker finishes what it runs.
GRACE_S = 10.0

#: How long all but Redis may take to be ready, in seconds; devices load models in that time.
START_TIMEOUT_S = 660.0

#: Pause between two polls of the child processes, in seconds.
POLL_S = 0.2

#: Number of ports that are tried for Flower, and for the gateway, from the one asked for.
MAX_PORTS = 100

#: Address of what only this machine may reach.
LOOPBACK = "127.0.0.1"

#: Addresses that mean all of this machine's.
ANY_ADDRESS = ("0.0.0.0", "::", "")

#: What is not there without its extra -> the extra.
EXTRAS = {"flower": ("flower", "monitor"), "gateway": ("fastapi", "gateway")}

#: Who stops first: the gateway's callers wait for the worker, and Flower watches it to its end.
STOP_ORDER = ("gateway", "worker", "flower")


class Stack:
    """Redis, a worker, Flower, the gateway; none of them outlives the process that started them.

    ```python
    with Stack() as stack:
        print(stack.redis_url, stack.flower_url)
    ```
    """

    #: URL of the Redis, with its password; empty before it runs.
    redis_url: str = ""

    #: URL of Flower; None if it does not run.
    flower_url: str | None = None

    #: URL of the gateway; None if it does not run.
    gateway_url: str | None = None

    def __init__(
        self,
        app: str = DEFAULT_APP,
        *,
        redis_url: str | None = None,
        data: Path | None = None,
        flower: bool = True,
        flower_port: int = 5555,
        gateway: bool = False,
        gateway_host: str = LOOPBACK,
        gateway_port: int = 8000,
        worker_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str, str], None] = lambda _name, _line: None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Prepares a stack; `start` starts it.

        Args:
            app: The Celery app, as for `celery -A`.
            redis_url: A Redis that runs already; None for a private one.
            data: Where the private one keeps its data; None if its end may lose them.
            flower: Whether Flower runs, if it is installed.
            flower_port: Its port on 127.0.0.1, or the next free one; 0 for any free port.
            gateway: Whether the HTTP gateway runs, if it is installed.
            gateway_host: Address that it listens on.
            gateway_port: Its port there, or the next free one; 0 for any free port.
            worker_arguments: Further arguments of `celery worker`.
            environment: More environment variables for all but Redis, such as settings.
            on_line: Called with `redis`, `worker`, `flower` or `gateway` and a line of its log,
                from threads.
            start_timeout_s: How long all but Redis may take to be ready, in seconds.
        """
        self._app = app
        self._given_url = redis_url and as_redis(redis_url)
        self._data = data
        self._ports = {"flower": (LOOPBACK, flower_port), "gateway": (gateway_host, gateway_port)}
        self._wants = {"flower": flower, "gateway": gateway}
        self._worker_arguments = worker_arguments
        self._environment = environment or {}
        self._on_line = on_line
        self._start_timeout_s = start_timeout_s
        #: Name of the worker, by which Flower and `celery inspect` know it.
        self.worker_name = f"batchery-{secrets.token_hex(3)}@{socket.gethostname()}"
        self._redis: EmbeddedRedis | None = None
        self._processes: dict[str, GuardedProcess] = {}
        self._said_ready = threading.Event()
        self._is_ready = False

    def start(self) -> Self:
        """Starts everything and waits until everything is ready.

        Raises:
            RedisUnavailable: No Redis answers at the URL, or none can be started.
            StartError: A process ended or was not ready in time. Its `exit_code` is 2 if the
                worker's was 2, which means that the worker has logged the reason; else 1.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def wait(self) -> None:
        """Waits until a process ends, which none should.

        Raises:
            StartError: A process ended; as for `start`.
        """
        while True:
            self._check_alive()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stops the gateway, the worker once it has finished what it runs, Flower, then the Redis.

        A `KeyboardInterrupt` meanwhile kills them all at once, and is raised again.
        """
        is_orderly = self._is_ready and "redis" not in self._find_ended()
        self._is_ready = False
        try:
            for name in STOP_ORDER:
                if name in self._processes:
                    self._processes[name].stop(None if is_orderly else GRACE_S)
        except BaseException:
            for process in self._processes.values():
                process.kill()
            raise
        finally:
            if self._redis is not None:
                self._redis.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what was started, by `redis`, `worker`, `flower` and `gateway`."""
        return {name: process.pid for name, process in self._processes.items()}

    def _start(self) -> None:
        if self._given_url is not None:
            check_redis(self._given_url)
            self.redis_url = self._given_url
        else:
            say = lambda line: self._on_line("redis", line)  # noqa: E731
            self._redis = EmbeddedRedis(self._data, on_line=say).start()
            self._processes["redis"] = self._redis.process
            self.redis_url = self._redis.url
        deadline_s = time.monotonic() + self._start_timeout_s
        options = ["worker", "--task-events", f"--hostname={self.worker_name}"]
        self._run("worker", WORKER, "-A", self._app, *options, *self._worker_arguments)
        if self._is_wanted("flower"):
            host, port = self._find_port("flower")
            options = ["flower", f"--address={host}", f"--port={port}"]
            # Who can reach 127.0.0.1 can also reach the Redis: a password protects nothing.
            more = {"FLOWER_UNAUTHENTICATED_API": "true"}
            self._run("flower", "celery", "-A", self._app, *options, **more)
            self.flower_url = f"http://{host}:{port}"
        if self._is_wanted("gateway"):
            host, port = self._find_port("gateway")
            # Another package, which this one does not import.
            options = ["serve", "-A", self._app, f"--host={host}", f"--port={port}"]
            self._run("gateway", "batchery", *options, **self._place_files())
            shown = LOOPBACK if host in ANY_ADDRESS else host
            self.gateway_url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
        self._wait_for("worker", self._said_ready.is_set, deadline_s)
        self._wait_for("flower", self._is_flower_ready, deadline_s)
        self._wait_for("gateway", self._is_gateway_ready, deadline_s)
        self._is_ready = True

    def _is_wanted(self, name: str) -> bool:
        module, extra = EXTRAS[name]
        if self._wants[name] and importlib.util.find_spec(module) is None:
            self._on_line(name, f'not installed: `pip install "batchery[{extra}]"` adds it')
            return False
        return self._wants[name]

    def _find_port(self, name: str) -> tuple[str, int]:
        """The address and the port that are wanted, or the next free one."""
        host, first = self._ports[name]
        if first == 0:
            return host, free_port()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        why = ""
        for port in range(first, min(first + MAX_PORTS, 2**16)):
            try:
                socket.create_server((host, port), family=family).close()
                return host, port
            except OSError as error:
                why = str(error.strerror)
        raise StartError(f"no free port for {name} on {host} from {first}: {why}")

    def _place_files(self) -> dict[str, str]:
        """Where the gateway keeps files: what a private Redis knows of them goes with it."""
        is_chosen = "files" in Settings.load().gateway.model_fields_set
        if is_chosen or self._given_url is not None or self._data is not None:
            return {}
        folder = tempfile.mkdtemp(prefix="batchery-files-")
        return {"BATCHERY_GATEWAY__FILES": folder}

    def _run(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        # They outrank the app's code. A default app's results may be kept elsewhere.
        backend = "BATCHERY_REDIS_URL" if self._app == DEFAULT_APP else "CELERY_RESULT_BACKEND"
        brokers = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")
        files = environment.get("BATCHERY_GATEWAY__FILES")
        self._processes[name] = GuardedProcess(
            [*python_command(), "-m", module, *arguments],
            environment={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                **environment,
                **self._environment,
                **dict.fromkeys((*brokers, backend), self.redis_url),
            },
            remove=None if files is None else Path(files),
            on_line=lambda line: self._take_line(name, line),
        )

    def _take_line(self, name: str, line: str) -> None:
        if name == "worker" and line == READY:
            self._said_ready.set()
        else:
            self._on_line(name, line)

    def _wait_for(self, name: str, is_ready: Callable[[], bool], deadline_s: float) -> None:
        while name in self._processes and not is_ready():
            self._check_alive()
            if time.monotonic() > deadline_s:
                error = StartError(f"{name} was not ready after {self._start_timeout_s:g} s")
                error.exit_code = 1
                raise error
            time.sleep(POLL_S)

    def _is_flower_ready(self) -> bool:
        """Whether it has received an event of the worker: from then on it misses no job."""
        said = _get(f"{self.flower_url}/workers?json=1")
        workers = json.loads(said)["data"] if said else []
        if said is None or self.worker_name in [each["hostname"] for each in workers]:
            # It asks workers when it starts, which is too early, so it must ask again.
            _get(f"{self.flower_url}/api/workers?refresh=1")
            return True
        return False

    def _is_gateway_ready(self) -> bool:
        return _get(f"{self.gateway_url}/health") != ""

    def _find_ended(self) -> dict[str, GuardedProcess]:
        return {name: each for name, each in self._processes.items() if each.poll() is not None}

    def _check_alive(self) -> None:
        for name, process in self._find_ended().items():
            raise _ended(name, process.wait(), process.tail())


def _get(url: str) -> str | None:
    """What a URL answers; empty if nobody does, and None if it refuses, as where it has a login."""
    # Without a proxy: one from the environment cannot reach this machine's own addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HTTP_TIMEOUT_S) as answer:
            return answer.read().decode() or " "
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except OSError:
        return ""


def _ended(name: str, code: int, log: str) -> StartError:
    """The error that a process has ended; codes above 128 are signals."""
    known = {128 + number: number.name for number in signal.Signals}
    signal_name = f" ({known[code]})" if code in known else ""
    last_words = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    error = StartError(f"{name} ended with exit code {code}{signal_name}: {last_words}")
    error.exit_code = 2 if name == "worker" and code == 2 else 1
    return error
