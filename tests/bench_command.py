"""`batchery bench` as a process."""

import subprocess
import sys
from pathlib import Path

BATCHERY = str(Path(sys.executable).with_name("batchery"))


def bench(*arguments: str, timeout_s: float = 150) -> "subprocess.CompletedProcess[str]":
    """Runs it to its end, whatever that is."""
    return subprocess.run(
        [BATCHERY, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
