"""The first minutes on a GPU: what works, what is right, and where the time goes.

Every step runs whatever became of the others, within its own share of ten minutes. The steps run
in one process, which is started anew for the rest if a step ends it. Both reports are written after
each step.

    python -m benchmarks.gpu_check --json gpu_check.json --page gpu_check.md
    python -m benchmarks.gpu_check --dry
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import write
from benchmarks.hardware import hardware
from benchmarks.venvs import ROOT

#: Name of each step -> its share of the time on a GPU, in seconds. What users ask for first comes
#: first, so that a run that is cut off after two minutes has it.
LIMITS_S = {
    "requests": 70,
    "bulk": 50,
    "versions": 15,
    "packed or why not": 40,
    "tests/gpu": 120,
    "host against device": 40,
    "dead context": 40,
    "graphs": 40,
    "memory flat": 15,
    "layers in main memory": 15,
    "a pipeline on two cards": 15,
}

#: Time of all steps together, in seconds: a machine is often lent for ten minutes, of which setting
#: up takes some.
TOTAL_S = sum(LIMITS_S.values())

#: Of a dry run: every step's, as a machine without a GPU may be slow.
DRY_LIMIT_S = 90

#: This program.
PROGRAM = (sys.executable, "-m", "benchmarks.gpu_check")

#: What a line begins with that is meant for this program.
MARK = "gpu-check: "

#: Last lines of a process that was ended by a step.
TAIL_LINES = 30


def main() -> None:
    """Runs all steps, or, as a child, some of them."""
    options = parse()
    if options.child:
        run_steps(options)
        return
    report = check(options)
    for name, step in report["steps"].items():
        print(f"{name}: {step['status']} {step.get('problem', '')} {step.get('note', '')}")
    print(f"{options.json} and {options.page}")
    if any(step["status"] != "ok" for step in report["steps"].values()):
        raise SystemExit(1)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="as torch spells it")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny, with stand-ins")
    parser.add_argument("--steps", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--page", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry:
        options.device = "cpu"
    return options


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the steps in children; never raises for what they do."""
    report: dict[str, Any] = {
        "hardware": hardware(),
        "device": options.device,
        "dry": options.dry,
        "steps": {name: {"status": "not run"} for name in options.steps},
    }
    left = list(options.steps)
    end_s = time.monotonic() + (len(left) * DRY_LIMIT_S if options.dry else TOTAL_S)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        while left and time.monotonic() < end_s:
            with contextlib.closing(child(options, tuple(left), Path(folder), end_s)) as steps:
                for name, found in steps:
                    report["steps"][name] = found
                    left.remove(name)
                    write(report, options.json, options.page)
    write(report, options.json, options.page)
    return report


def child(
    options: argparse.Namespace, names: Sequence[str], folder: Path, end_s: float
) -> Generator[tuple[str, dict[str, Any]]]:
    """Runs steps in a new process; ends with the first step that ends it or takes too long."""
    command = [*PROGRAM, "--device", options.device, *(["--dry"] if options.dry else [])]
    command += ["--child", str(folder), "--steps", *names]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What it has started ends with it.
        start_new_session=True,
    )
    lines = _lines(process)
    tail: list[str] = []
    try:
        for name in names:
            limit_s = DRY_LIMIT_S if options.dry else LIMITS_S[name]
            started_s = time.monotonic()
            found = _await(lines, tail, min(end_s, started_s + limit_s))
            seconds = round(time.monotonic() - started_s, 1)
            if isinstance(found, str):
                yield name, {"status": found, "seconds": seconds, "output": tail[-TAIL_LINES:]}
                return
            yield name, {**found, "seconds": seconds}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The end of its output, which is closed then.
        while lines.get() is not None:
            pass


def _lines(process: "subprocess.Popen[str]") -> "queue.SimpleQueue[str | None]":
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _await(
    lines: "queue.SimpleQueue[str | None]", tail: list[str], end_s: float
) -> dict[str, Any] | str:
    """What a step has found; or that it took too long, or ended its process."""
    while True:
        try:
            line = lines.get(timeout=max(0.01, end_s - time.monotonic()))
        except queue.Empty:
            return "took too long"
        if line is None:
            lines.put(None)
            return "ended its process"
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
        tail.append(line)


def run_steps(options: argparse.Namespace) -> None:
    """Runs steps in this process, and tells of each in a line."""
    # Only children need torch.
    from benchmarks.gpu_check import graphs, kernels, parts, passes, processes
    from benchmarks.gpu_check.check import Check

    known: dict[str, Callable[[Check], dict[str, Any]]] = {}
    for module in (graphs, kernels, parts, passes, processes):
        known |= module.STEPS
    steps = Check(options.device, options.dry, options.child)
    for name in options.steps:
        try:
            steps.limit_s = DRY_LIMIT_S if options.dry else LIMITS_S[name]
            found = known[name](steps)
            found["status"] = "problem" if "problem" in found else "ok"
        except Exception as error:  # noqa: BLE001 (the next steps may work)
            found = {
                "status": "failed",
                "problem": f"{type(error).__name__}: {error}"[:500],
                "output": traceback.format_exc().splitlines()[-TAIL_LINES:],
            }
        print(MARK + json.dumps(found, default=str), flush=True)


if __name__ == "__main__":
    main()
