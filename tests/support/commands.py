"""The commands of Batchery and Celery in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from support.harness import TESTS
from support.patience import patient

#: How long a command may take, in seconds.
TIMEOUT_S = patient(60)


def start(redis_url: str, *command: str, cwd: Path | None = None) -> "subprocess.Popen[str]":
    """Starts a Python module as a command, on a Redis and with the tests' apps."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "PYTHONUNBUFFERED": "1",
            "CELERY_BROKER_URL": redis_url,
            "CELERY_RESULT_BACKEND": redis_url,
            "COLUMNS": "150",
        },
    )


def run(redis_url: str, *command: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Runs one to its end; returns its exit code, and what it printed on stdout and on stderr."""
    with start(redis_url, *command, cwd=cwd) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err
