"""Bulk runs for tests: inputs, and the command as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet

from support.harness import PYTHONPATH, queue_length, unsettled, wait_for
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
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_bytes().splitlines()]


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
