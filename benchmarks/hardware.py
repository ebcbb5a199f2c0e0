"""What a benchmark ran on; every one of them prints it and writes it beside its figures."""

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
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


def command(name: str) -> str:
    """The command of a benchmark as another machine would run it: without paths of this one."""
    kept: list[str] = []
    is_path = False
    for each in sys.argv[1:]:
        if each.startswith("--"):
            option = each.partition("=")[0]
            is_path = option.startswith(("--venvs", "--write")) or option == "--keep"
        if not is_path:
            kept.append(shlex.quote(each))
    return " ".join([f"python -m benchmarks.{name}", *kept])


def write_report(target: Path | None, report: Mapping[str, Any]) -> None:
    """Writes the figures of a benchmark, if its caller has named a file for them."""
    if target:
        target.write_text(json.dumps(report, indent=1) + "\n")
