"""What `make` does before it installs anything: says what is missing, and chooses torch's index.

It runs on the Python that was asked for, which may be old, so it uses no new syntax.

    python .ci/preflight.py check              exit code 1, and what is missing, on stderr
    python .ci/preflight.py torch-index [URL]  prints the index; nothing for pip's own
"""

import importlib.util
import os
import platform
import shutil
import sys
import urllib.request
from typing import Callable, Sequence  # noqa: UP035 (an old Python has them only there)

#: The oldest Python that works, and the newest that was tried.
OLDEST, NEWEST = (3, 11), (3, 14)

#: torch without CUDA; on Linux, pip's own index has it with CUDA.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

#: How long that index may take to answer, in seconds.
ANSWER_S = 5

#: What the installation needs on the disk, in bytes: without CUDA, and with it.
DISK_BYTES = {False: 2 * 10**9, True: 8 * 10**9}


def missing(
    version: tuple,
    system: str,
    libc: str,
    modules: Sequence[str],
    free_bytes: int,
    needed_bytes: int,
) -> Sequence[str]:
    """What stands in the way of an installation, a sentence each."""
    spelled = ".".join(str(part) for part in version[:2])
    found = []
    if version[:2] < OLDEST:
        found.append(
            f"Batchery needs Python 3.11 or newer, but this is {spelled}:"
            " say make PYTHON=python3.12"
        )
    found += [
        f"Python {spelled} has no module {name}: apt install python{spelled}-venv,"
        " or say make PYTHON=..."
        for name in ("venv", "ensurepip", "ssl", "sqlite3")
        if name not in modules
    ]
    if system == "Windows":
        found.append("Celery's workers do not run on Windows: use WSL")
    if system == "Linux" and libc not in ("", "glibc"):
        found.append(f"torch has no wheels for {libc}: use a distribution with glibc")
    if free_bytes < needed_bytes:
        found.append(
            f"{free_bytes / 1e9:.1f} GB of disk are free here,"
            f" and .venv needs {needed_bytes / 1e9:.0f} GB"
        )
    return found


def has_nvidia_driver() -> bool:
    """Whether torch could use a CUDA device."""
    return os.path.exists("/proc/driver/nvidia/version") or bool(shutil.which("nvidia-smi"))


def torch_index(
    given: str, system: str, driver: bool, answers: Callable[[str], bool]
) -> Sequence[str]:
    """The index for torch, and why; an empty index is pip's own.

    Args:
        given: What the user chose; empty for no choice.
        system: As from `platform.system()`.
        driver: Whether there is a driver of NVIDIA.
        answers: Asks whether an index can be reached.
    """
    if given:
        return given, f"torch comes from {given}, as you said"
    if system != "Linux":
        return "", "torch comes from pip's own index, without CUDA"
    if driver:
        return "", "torch comes from pip's own index with CUDA, as there is an NVIDIA driver: 3 GB"
    if answers(CPU_INDEX):
        return CPU_INDEX, "torch comes without CUDA, as there is no NVIDIA driver: 0.2 GB"
    return "", f"torch comes as pip has it, maybe with CUDA, 3 GB: {CPU_INDEX} does not answer"


def answers(index: str) -> bool:
    """Whether an index of packages can be reached."""
    try:
        urllib.request.urlopen(f"{index}/torch/", timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def main(command: str, given: str = "") -> int:
    """Runs a command; returns the exit code."""
    if command == "check":
        names = ("venv", "ensurepip", "ssl", "sqlite3")
        found = missing(
            sys.version_info,
            platform.system(),
            platform.libc_ver()[0],
            [name for name in names if importlib.util.find_spec(name)],
            shutil.disk_usage(".").free,
            # What is there needs little more.
            0 if os.path.exists(".venv") else DISK_BYTES[has_nvidia_driver()],
        )
        for line in found:
            sys.stderr.write(f"preflight: {line}\n")
        if not found and sys.version_info[:2] > NEWEST:
            sys.stderr.write("preflight: newer than what was tried, Python 3.11 to 3.14\n")
        return 1 if found else 0
    index, why = torch_index(given, platform.system(), has_nvidia_driver(), answers)
    sys.stderr.write(f"Installing into .venv, once, for some minutes: {why};\n")
    sys.stderr.write("then the rest: 0.3 GB, and 0.4 GB for tests. `make clean` removes it.\n")
    sys.stdout.write(index)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
