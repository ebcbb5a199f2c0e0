"""A benchmark as a process."""

import subprocess
import sys
from pathlib import Path

from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]


def bench(
    name: str, *arguments: str, timeout_s: float = patient(150)
) -> "subprocess.CompletedProcess[str]":
    """Runs it to its end, whatever that is."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
    )
