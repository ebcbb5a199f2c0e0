"""The commands of Batchery and Celery in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness import PYTHONPATH
from support.patience import TIMEOUT_S


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
            "PYTHONPATH": PYTHONPATH,
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


def run_code(redis_url: str, code: str, **environment: str) -> Any:
    """Runs code in a process of its own, on a Redis and with the tests' apps; it prints JSON.

    Args:
        redis_url: Broker and result backend.
        code: Of Python.
        environment: Further variables.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": PYTHONPATH,
            "CELERY_BROKER_URL": redis_url,
            "CELERY_RESULT_BACKEND": redis_url,
        },
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
