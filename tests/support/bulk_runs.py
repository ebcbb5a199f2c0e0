"""Bulk runs for tests: inputs, the command as a process, a Redis that can be restarted."""

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from batchery_worker.devstack.redis_server import find_redis_server
from support.harness import PYTHONPATH, queue_length, unsettled, wait_for
from support.own_redis import find_lasting_port
from support.patience import patient

#: The app that the tests submit to, and its queue.
APP = "apps.shop"
QUEUE = "celery"


def write_rows(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": f"row-{n}", "text": f"text {n}"}) + "\n" for n in range(count))
    )
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.name.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines()]


def wait_idle(redis_url: str) -> None:
    """Waits until no job of an earlier run is left, whose result would come later."""
    wait_for(
        lambda: not queue_length(redis_url, QUEUE) and not unsettled(redis_url), "no job is left"
    )


class Command:
    """A `batchery submit` process."""

    def __init__(self, directory: Path, redis_url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchery_producer.cli.submit", *arguments],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "CELERY_BROKER_URL": redis_url,
                "CELERY_RESULT_BACKEND": redis_url,
            },
        )

    def end(self, stdin: bytes = b"") -> tuple[int, str, str]:
        """Waits for the end; returns exit code, stdout and stderr."""
        try:
            stdout, stderr = self.process.communicate(stdin, timeout=patient(60))
        finally:
            self.process.kill()
        return self.process.returncode, stdout.decode(), stderr.decode()


class RestartableRedis:
    """A redis-server on one port, whose data outlives it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = find_lasting_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [find_redis_server(), "--port", str(self.port), "--appendonly", "yes", "--save", ""],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._listens, "redis-server")
        return process

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(patient(20))

    def start(self) -> None:
        self.process = self._start()
