"""What a benchmark ran on; every one of them prints it and writes it beside its figures."""

import json
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
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
    kept = []
    for each in sys.argv[1:]:
        option, sign, value = each.rpartition("=")
        kept.append(shlex.quote(option + sign + without_folder(value)))
    return " ".join([f"python -m benchmarks.{name}", *kept])


def without_folder(text: str) -> str:
    """The last part of a path of this machine; anything else as it is."""
    return Path(text).name if text.startswith(("/", "..")) else text


def describe_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """How long the items of a benchmark are."""
    return {
        "count": len(lengths),
        "median": statistics.median(lengths),
        "mean": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
    }


def write_report(target: Path | None, report: Mapping[str, Any]) -> None:
    """Writes the figures of a benchmark, if its caller has named a file for them."""
    if target:
        target.write_text(json.dumps(report, indent=1) + "\n")
