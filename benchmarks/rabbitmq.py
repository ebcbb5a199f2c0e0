"""A RabbitMQ of one's own that may be killed, where Debian's package is installed."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import psutil
from kombu import Connection
from kombu.exceptions import OperationalError

from batchery_worker.devstack.guarded_process import GuardedProcess
from benchmarks.redis_cluster import find_lasting_port, wait_for

#: How long one connection may take while Erlang boots, in seconds.
CONNECT_S = 60.0

#: The command in PATH insists on a user of its own and on the machine's directories.
DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


def find_rabbitmq() -> str | None:
    """The program that starts a RabbitMQ as whoever calls it; None where there is none."""
    return str(DEBIAN) if DEBIAN.exists() else shutil.which("rabbitmq-server")


class OwnRabbitMQ:
    """Everything that it writes is in one directory, every port that it opens is free before."""

    def __init__(self, directory: Path, program: str) -> None:
        """Starts it; `wait_ready` says when it takes connections.

        Args:
            directory: Where it keeps its data; it is made.
            program: See `find_rabbitmq`.
        """
        directory.mkdir(exist_ok=True)
        port = find_lasting_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._names_port = str(find_lasting_port())
        self._program = program
        self._directory = directory
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "ERL_EPMD_PORT": self._names_port,
            "RABBITMQ_NODENAME": f"batchery-{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(find_lasting_port()),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        }
        self._process: GuardedProcess | None = None
        self.start()

    def start(self) -> None:
        """Starts it on its data, if it does not run."""
        if self._process is None:
            self._process = GuardedProcess(
                [self._program], cwd=self._directory, env=self._environment
            )

    def wait_ready(self) -> None:
        """Waits until it takes connections.

        Raises:
            TimeoutError: It does not.
        """
        wait_for(self._answers, "RabbitMQ answers")

    @property
    def is_running(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

    def kill(self) -> None:
        """Ends it by kill -9, and all that it has started in its group."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def drop_connections(self) -> None:
        """Cuts every client off, as an operator can."""
        control = str(Path(self._program).with_name("rabbitmqctl"))
        subprocess.run(
            [control, "close_all_connections", "a test"],
            env=self._environment,
            capture_output=True,
            check=True,
        )

    def stop(self) -> None:
        """Ends it, and the name server that Erlang starts beside it."""
        self.kill()
        for process in psutil.process_iter(["name"]):
            # It has left the family, but not its environment.
            if process.info["name"] == "epmd" and self._names_port == _names_port(process):
                process.kill()

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise TimeoutError(f"RabbitMQ has ended: {self._process.tail(5)}")
        try:
            with Connection(self.url, connect_timeout=CONNECT_S) as connection:
                connection.connect()
                return True
        except (OperationalError, OSError):
            return False


def _names_port(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        found: str | None = process.environ().get("ERL_EPMD_PORT")
        return found
    return None
