"""Tests that run in a process of their own: a worker leaves its marks on the one that it was in."""

import os
import subprocess
import sys
from pathlib import Path

from support.harness import PYTHONPATH
from support.patience import patient


def run_alone(code: str, *arguments: str, folder: Path) -> None:
    """Runs a test, whose warnings are errors, and which prints `done` and nothing else.

    Args:
        code: The test.
        arguments: What it finds in `sys.argv`.
        folder: Where it runs.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "WORKER_LOGLEVEL": "error"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(240),
    )
    assert done.stdout == "done\n", done.stdout + done.stderr
