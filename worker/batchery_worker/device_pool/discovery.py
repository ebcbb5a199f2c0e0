"""Finds the devices of this machine, without importing torch into this process."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

#: Counts the CUDA devices that torch will see, given the driver and CUDA_VISIBLE_DEVICES.
_COUNT = "import torch; print(torch.cuda.device_count())"

#: Long enough for a cold import of torch from a slow disk, in seconds.
_COUNT_TIMEOUT_S = 120


def choose(devices: Literal["auto"] | Sequence[str]) -> list[str]:
    """Resolves the `devices` setting.

    Args:
        devices: Names; or `auto` for every CUDA device, or the CPU if there is none.

    Returns:
        One name per device process, such as `["cuda:0", "cuda:1"]`.
    """
    if devices != "auto":
        return ["cuda:0" if name == "cuda" else name for name in devices]
    return [f"cuda:{index}" for index in range(_cuda_count())] or ["cpu"]


def _cuda_count() -> int:
    # To ask torch takes seconds. Without a driver there is no device file, and nothing to ask.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _COUNT],
            capture_output=True,
            text=True,
            timeout=_COUNT_TIMEOUT_S,
            check=True,
        )
        return int(answer.stdout)
    except (subprocess.SubprocessError, ValueError):
        return 0
