"""What NVIDIA's own tool says of a GPU; nothing where there is none."""

import contextlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator

TOOL = "nvidia-smi"

#: Pause between two looks at the GPU, in ms. NVML itself averages over a sixth of a second or more.
LOOK_MS = 200


def gpu_name(device: str) -> str | None:
    """What the GPU is called; None for a CPU, and where the tool does not know the device."""
    if not device.startswith("cuda") or shutil.which(TOOL) is None:
        return None
    done = subprocess.run(_command(device, "name"), capture_output=True, text=True, check=False)
    # It takes no name of a part of a GPU (MIG), and may say "No devices were found".
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines and not done.returncode else None


@contextlib.contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Shares of time in which a kernel ran, 0 to 1, as NVML counts them: one per look.

    The list is filled when the block ends, and stays empty on a CPU.
    """
    shares: list[float] = []
    with _watched(device, "utilization.gpu", LOOK_MS) as percents:
        yield shares
    shares += [each / 100 for each in percents]


@contextlib.contextmanager
def used_mib(device: str) -> Iterator[list[float]]:
    """Memory of the GPU that is in use, by whomever, in MiB: once a second; as `utilisation`."""
    with _watched(device, "memory.used", 1000) as used:
        yield used


@contextlib.contextmanager
def _watched(device: str, what: str, pause_ms: int) -> Iterator[list[float]]:
    seen: list[float] = []
    if gpu_name(device) is None:
        yield seen
        return
    command = [*_command(device, what), f"--loop-ms={pause_ms}"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield seen
    finally:
        watcher.terminate()
        text, _ = watcher.communicate()
        seen += [float(line) for line in text.split() if line.isdigit()]


def mean(shares: list[float]) -> float | None:
    """The mean of what was seen; None if nothing was."""
    return round(statistics.mean(shares), 3) if shares else None


def _command(device: str, what: str) -> list[str]:
    number = int(device.partition(":")[2] or 0)
    # CUDA counts only the visible devices, and the tool counts all. Both know the same names.
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[number] if any(visible) and number < len(visible) else str(number)
    return [TOOL, f"--id={name}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
