"""What a benchmark ran on; every one of them prints it and writes it beside its figures."""

import platform
from typing import Any

import psutil


def hardware() -> dict[str, Any]:
    """Machine, cores, memory and Python; no name, no path."""
    return {
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
