"""A RabbitMQ of a test module's own, where Debian's package is installed."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import psutil
from kombu import Connection
from kombu.exceptions import OperationalError

from support.harness import wait_for
from support.own_redis import find_lasting_port
from support.patience import patient

#: Slow machines boot Erlang in half a minute.
BOOT_S = patient(120.0)

#: The command in PATH insists on a user of its own and on the machine's directories.
DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


def find_rabbitmq() -> str | None:
    """The program that starts a RabbitMQ as whoever calls it; None where there is none."""
    return str(DEBIAN) if DEBIAN.exists() else shutil.which("rabbitmq-server")


class OwnRabbitMQ:
    """Everything that it writes is in one directory, every port that it opens is free before."""

    def __init__(self, directory: Path, program: str) -> None:
        directory.mkdir(exist_ok=True)
        port = find_lasting_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        self._log = (directory / "rabbitmq.log").open("wb")
        self._names_port = str(find_lasting_port())
        self._program = program
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
        self._process = subprocess.Popen(
            [program],
            cwd=directory,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=self._environment,
        )

    def wait_ready(self) -> None:
        """Waits until it takes connections."""
        wait_for(self._answers, "RabbitMQ answers", BOOT_S)

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
        parent = psutil.Process(self._process.pid)
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()
        for process in psutil.process_iter(["name"]):
            # It has left the family, but not its environment.
            if process.info["name"] == "epmd" and self._names_port == _names_port(process):
                process.kill()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "RabbitMQ has ended"
        try:
            with Connection(self.url, connect_timeout=patient(20)) as connection:
                connection.connect()
                return True
        except (OperationalError, OSError):
            return False


def _names_port(process: psutil.Process) -> str | None:
    try:
        port: str | None = process.environ().get("ERL_EPMD_PORT")
    except psutil.Error:
        return None
    return port
