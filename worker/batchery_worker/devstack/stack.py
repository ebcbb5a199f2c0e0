"""Redis, a worker, Flower and the HTTP gateway as child processes, for `batchery up`."""

import errno
import importlib.util
import json
import os
import secrets
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.cli.app import DEFAULT_APP, check_redis
from batchery.cli.survey import parse_registered
from batchery.errors import RedisUnavailable, StartError
from batchery.valkey import redis_url as as_redis
from batchery_worker.devstack.guarded_process import GuardedProcess, python_command
from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port

#: How long Flower and the gateway may take for one answer, in seconds.
HTTP_TIMEOUT_S = 2.0

#: How long the worker may take for one answer, in seconds; a busy machine needs that long.
WORKER_TIMEOUT_S = 5.0

#: The same while it starts, when it is asked repeatedly.
PING_TIMEOUT_S = 1.0

#: No second attempt: while kombu waits for a dead Redis, nobody looks at the processes.
NO_RETRIES = {"max_retries": 0}

#: How long a worker or Flower may take to end in an emergency, in seconds; then it is killed.
#: An orderly stop has no limit: the worker finishes what it runs.
GRACE_S = 10.0

#: How long worker and Flower may take to be ready, in seconds; devices load models in that time.
START_TIMEOUT_S = 660.0

#: Pause between two polls of the child processes, in seconds.
POLL_S = 0.2

#: Number of ports that are tried for Flower, and for the gateway, from the one asked for.
MAX_PORTS = 100

#: What they say when their port is not free any more.
PORT_TAKEN = os.strerror(errno.EADDRINUSE)

#: Address of what only this machine may reach.
LOOPBACK = "127.0.0.1"

#: What the gateway needs; where it is missing, the extra is not installed.
GATEWAY_MODULES = ("fastapi", "uvicorn", "prometheus_client")

#: Addresses that mean all of this machine's.
ANY_ADDRESS = ("0.0.0.0", "::", "")

#: Runs a worker of all the queues of its tasks.
OWN_QUEUES = "batchery_worker.devstack.worker"

#: Who stops first: the gateway's callers wait for the worker, and Flower watches it to its end.
STOP_ORDER = ("gateway", "worker", "flower")


def flower_sees(url: str, worker: str) -> bool:
    """Whether Flower answers and has received an event of the worker.

    From then on it misses no job. An answer alone only means that its web server runs.
    """
    opener = _opener()
    try:
        with opener.open(f"{url}/workers?json=1", timeout=HTTP_TIMEOUT_S) as answer:
            workers = json.load(answer)["data"]
        if all(each["hostname"] != worker for each in workers):
            return False
        # Flower asks workers when it starts, which is too early, so it must ask again.
        opener.open(f"{url}/api/workers?refresh=1", timeout=HTTP_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        # Flower is up, but the user has switched on a login, or chosen another path.
        error.close()
    except (OSError, ValueError, KeyError):
        return False
    return True


def gateway_answers(url: str) -> bool:
    """Whether the gateway serves."""
    try:
        _opener().open(f"{url}/health", timeout=HTTP_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        # It serves, and says what is wrong: Redis is away, or it has other host names.
        error.close()
    except OSError:
        return False
    return True


def is_free(host: str, port: int) -> bool:
    """Whether a port can be listened on.

    Raises:
        StartError: The host is none of this machine's addresses.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise StartError(f"cannot listen on {host}: {error.strerror}") from error
    return True


def _opener() -> urllib.request.OpenerDirector:
    # Without a proxy: one from the environment cannot reach this machine's own addresses.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteWorker:
    """A worker, asked over remote control; it does not answer if its app has switched that off."""

    def __init__(self, redis_url: str, name: str) -> None:
        self._redis_url = redis_url
        self._name = name

    def answers(self) -> bool:
        """Whether it answers at all: then it has started."""
        return self._ask("ping", timeout_s=PING_TIMEOUT_S) is not None

    def tasks(self) -> dict[str, str | None]:
        """The queue of each of its tasks, by name; None for a task that names no queue."""
        answer = parse_registered({self._name: self._ask("registered", "queue", "model_queue")})
        return {
            name: info.get("model_queue", info.get("queue"))
            for name, info in answer.get(self._name, {}).items()
        }

    def queues(self) -> list[str]:
        """Names of the queues that it consumes, sorted."""
        return sorted(queue["name"] for queue in self._ask("active_queues") or [])

    def _ask(self, question: str, *arguments: str, timeout_s: float = WORKER_TIMEOUT_S) -> Any:
        control: Any = Celery(set_as_current=False).control
        # With the pool, it would publish to the environment's broker instead of this connection.
        control.mailbox.producer_pool = None
        try:
            with Connection(self._redis_url, transport_options=NO_RETRIES) as connection:
                inspect = control.inspect([self._name], timeout=timeout_s, connection=connection)
                answers = getattr(inspect, question)(*arguments)
        except (OperationalError, RedisError, OSError):
            return None
        return (answers or {}).get(self._name)


class Stack:
    """Redis, a worker, Flower, the gateway; none of them outlives the process that started them.

    ```python
    with Stack() as stack:
        print(stack.redis_url, stack.flower_url)
    ```
    """

    #: URL of Flower; None if it does not run.
    flower_url: str | None = None

    #: URL of the gateway on this machine; None if it does not run.
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
        loglevel: str = "INFO",
        concurrency: int | None = None,
        queues: str | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str, str], None] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        worker_arguments: Sequence[str] = (),
    ) -> None:
        """Prepares a stack; `start` starts it.

        Args:
            app: The Celery app, as for `celery -A`.
            redis_url: Redis for broker and results; None for an embedded one.
            data: Directory of the embedded Redis, which is kept; None for a temporary one.
            flower: Whether to run Flower, if it is installed.
            flower_port: Its port on 127.0.0.1, or the next free one; 0 for any free port.
            gateway: Whether to run the HTTP gateway, if it is installed.
            gateway_host: Address that it listens on.
            gateway_port: Its port there, or the next free one; 0 for any free port.
            loglevel: Log level of the worker.
            concurrency: Concurrency of the worker; None for Celery's default.
            queues: Queues of the worker, separated by commas; None for those of its tasks, and the
                app's default queue.
            environment: More environment variables for all but Redis, such as settings.
            on_line: Called with `redis`, `worker`, `flower` or `gateway` and a line of its log,
                from threads.
            start_timeout_s: How long all but Redis may take to be ready, in seconds.
            worker_arguments: Further arguments of `celery worker`.
        """
        self._app = app
        self._given_url = redis_url and as_redis(redis_url)
        self._data = data
        self._wants_flower = flower
        self._flower_port = flower_port
        self._wants_gateway = gateway
        self._gateway_host = gateway_host
        self._gateway_port = gateway_port
        self._on_line = on_line
        self._environment = environment or {}
        self._start_timeout_s = start_timeout_s
        #: Name of the worker, by which Flower and `celery inspect` know it.
        self.worker_name = f"batchery-{secrets.token_hex(3)}@{socket.gethostname()}"
        options = {"--loglevel": loglevel, "--concurrency": concurrency, "--queues": queues}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        self._worker_arguments = [*given, *worker_arguments]
        self._worker_module = "celery" if queues is not None else OWN_QUEUES
        self._redis: EmbeddedRedis | None = None
        self._processes: dict[str, GuardedProcess] = {}
        self._said_ready = threading.Event()
        self._ready = False

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

    def wait(self, on_poll: Callable[[], None] = lambda: None) -> None:
        """Waits until a process ends, which none should; calls `on_poll` several times a second.

        Raises:
            StartError: A process ended; as for `start`.
        """
        while True:
            self._check_alive()
            on_poll()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stops the gateway, the worker once it has finished what it runs, Flower, then the Redis.

        A `KeyboardInterrupt` meanwhile kills them all at once, and is raised again.
        """
        orderly = self._ready and (self._redis is None or self._redis.poll() is None)
        self._ready = False
        try:
            for name in STOP_ORDER:
                if name in self._processes:
                    self._processes[name].stop(None if orderly else GRACE_S)
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
    def redis_url(self) -> str:
        """URL of the Redis, with its password.

        Raises:
            RedisUnavailable: The embedded one was not started.
        """
        if self._redis is not None:
            return self._redis.url
        if self._given_url is None:
            raise RedisUnavailable("the embedded Redis is not running: start the stack first")
        return self._given_url

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what was started, by `redis`, `worker`, `flower` and `gateway`."""
        redis = {"redis": self._redis.pid} if self._redis is not None else {}
        return redis | {name: process.pid for name, process in self._processes.items()}

    @property
    def remote(self) -> RemoteWorker:
        """The worker, to be asked for its tasks and queues."""
        return RemoteWorker(self.redis_url, self.worker_name)

    def _start(self) -> None:
        self._processes.clear()
        self._said_ready.clear()
        if self._given_url is not None:
            check_redis(self._given_url)
        else:
            self._redis = EmbeddedRedis(self._data, on_line=self._sink("redis")).start()
        deadline = time.monotonic() + self._start_timeout_s
        worker = ["worker", "--task-events", f"--hostname={self.worker_name}"]
        command = self._celery(*worker, *self._worker_arguments, module=self._worker_module)
        self._spawn("worker", command, {})
        if self._wants_flower:
            self._start_flower()
        if self._wants_gateway:
            self._start_gateway()
        # A worker below log level INFO does not say it; one without remote control does not answer.
        remote, said = self.remote, self._said_ready
        self._wait_for("worker", lambda: said.is_set() or remote.answers(), deadline)
        if (flower := self.flower_url) is not None:
            self._wait_for("flower", lambda: flower_sees(flower, self.worker_name), deadline)
        if self.gateway_url is not None:
            self._wait_for("gateway", lambda: gateway_answers(str(self.gateway_url)), deadline)
        self._ready = True

    def _start_flower(self) -> None:
        if importlib.util.find_spec("flower") is None:
            self._sink("flower")('not installed: `pip install "batchery[monitor]"` adds it')
            return
        port = self._free_port("flower", LOOPBACK, self._flower_port)
        # A process that can reach 127.0.0.1 can also reach the Redis: a password protects nothing.
        environment = {"FLOWER_UNAUTHENTICATED_API": "true"}
        arguments = ["flower", f"--address={LOOPBACK}", f"--port={port}"]
        self._spawn("flower", self._celery(*arguments), environment)
        self.flower_url = f"http://{LOOPBACK}:{port}"

    def _start_gateway(self) -> None:
        if any(importlib.util.find_spec(module) is None for module in GATEWAY_MODULES):
            self._sink("gateway")('not installed: `pip install "batchery[gateway]"` adds it')
            return
        host = self._gateway_host
        port = self._free_port("gateway", host, self._gateway_port)
        # Another package, which this one does not import.
        command = [*python_command(), "-m", "batchery", "serve", "-A", self._app]
        self._spawn("gateway", [*command, f"--host={host}", f"--port={port}"], {})
        shown = LOOPBACK if host in ANY_ADDRESS else host
        self.gateway_url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"

    def _free_port(self, name: str, host: str, first: int) -> int:
        """The port that is wanted, or the next free one."""
        if first == 0:
            return free_port()
        last = min(first + MAX_PORTS, 2**16) - 1
        for port in range(first, last + 1):
            if is_free(host, port):
                return port
        raise StartError(f"no free port for {name} from {first} to {last}: give --{name}-port")

    def _celery(self, *arguments: str, module: str = "celery") -> list[str]:
        return [*python_command(), "-m", module, "-A", self._app, *arguments]

    def _spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self._processes[name] = GuardedProcess(
            command,
            grace_s=GRACE_S,
            environment={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                **self._environment,
                **self._urls(),
                **environment,
            },
            # The Redis outlives the worker, even where this process is killed.
            keep_open=(self._redis.lifeline,) if self._redis is not None else (),
            on_line=self._sink(name),
        )

    def _urls(self) -> dict[str, str]:
        """Variables that tell Celery where the Redis is; they outrank the app's code."""
        url = self.redis_url
        urls = dict.fromkeys(
            ["CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL"], url
        )
        if self._app != DEFAULT_APP:
            return {**urls, "CELERY_RESULT_BACKEND": url}
        # Its results may be kept elsewhere: the setting `result_url` decides.
        return {**urls, "BATCHERY_REDIS_URL": url}

    def _sink(self, name: str) -> Callable[[str], None]:
        def sink(line: str) -> None:
            if name == "worker" and line.endswith(f"{self.worker_name} ready."):
                self._said_ready.set()
            if self._on_line is not None:
                self._on_line(name, line)

        return sink

    def _wait_for(self, name: str, is_ready: Callable[[], bool], deadline: float) -> None:
        while not is_ready():
            self._check_alive()
            if time.monotonic() > deadline:
                error = StartError(f"{name} was not ready after {self._start_timeout_s:g} s")
                error.exit_code = 1
                raise error
            time.sleep(POLL_S)

    def _check_alive(self) -> None:
        if self._redis is not None and (code := self._redis.poll()) is not None:
            raise _ended("redis", code, self._redis.log)
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                code, tail = process.wait(), process.tail()
                again = {"flower": self._start_flower, "gateway": self._start_gateway}.get(name)
                # Somebody else took the port between our look at it and theirs.
                if again is not None and not self._ready and PORT_TAKEN in tail:
                    again()
                else:
                    raise _ended(name, code, tail)


def _ended(name: str, code: int, log: str) -> StartError:
    """The error that a process has ended; codes above 128 are signals."""
    known = {128 + number: number.name for number in signal.Signals}
    signal_name = f" ({known[code]})" if code in known else ""
    last_words = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    error = StartError(f"{name} ended with exit code {code}{signal_name}: {last_words}")
    error.exit_code = 2 if name == "worker" and code == 2 else 1
    return error
