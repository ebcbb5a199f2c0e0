"""Steps that are programs of their own: the tests, a context that dies, and two benchmarks."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery import Celery

from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.kernels import product_flops
from benchmarks.venvs import ROOT, child_environment

#: The app with a model that breaks its device.
APP = "benchmarks.peers.gpu_check_app"

#: Good jobs that wait together with the one that breaks the device.
GOOD_JOBS = 12

#: Timeout of their results, in seconds: the device starts anew up to three times.
RESULTS_S = 75.0

#: What is left of a step's time once its benchmark is cut off, in seconds, to report it.
REPORT_S = 3.0

#: Last lines of a program that failed.
TAIL_LINES = 30


def gpu_tests(check: Check) -> dict[str, Any]:
    """The tests that need a GPU; without one, all of them are skipped."""
    # All of them are skipped in a dry run, and one file shows that they would run.
    tests = "tests/gpu/test_memory.py" if check.dry else "tests/gpu"
    command = [sys.executable, "-m", "pytest", tests, "-q", "-rfE", "-p", "no:cacheprovider"]
    done = _run([*command, "-o", "filterwarnings=default", "--no-header", "--tb=short"])
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = {"note": lines[-1] if lines else ""}
    if done.returncode or (" passed" not in found["note"] and not check.dry):
        found["problem"] = f"exit code {done.returncode}"
        found["output"] = lines[-200:]
    return found


def dead_context(check: Check) -> dict[str, Any]:
    """A job ends CUDA's context: its device must end too, and all other jobs must succeed."""
    with _worker(check) as (app, worker):
        results = [
            app.send_task("fragile", [text], queue="fragile")
            for text in ["good"] * (GOOD_JOBS // 2) + ["bad"] + ["good"] * (GOOD_JOBS // 2)
        ]
        started_s = time.perf_counter()
        states = []
        for result in results:
            left_s = max(0.1, RESULTS_S - (time.perf_counter() - started_s))
            with contextlib.suppress(Exception):
                result.get(timeout=left_s, propagate=False)
            states.append(result.state)
        took_s = time.perf_counter() - started_s
        again = app.send_task("fragile", ["good"], queue="fragile")
        with contextlib.suppress(Exception):
            again.get(timeout=RESULTS_S, propagate=False)
        found: dict[str, Any] = {
            "states": states,
            "afterwards": again.state,
            "seconds": round(took_s, 1),
            "error": str(results[GOOD_JOBS // 2].result)[:300],
        }
        good = states.count("SUCCESS")
        found["note"] = f"{good} of {GOOD_JOBS} others succeeded in {took_s:.0f} s"
        right = good == GOOD_JOBS and states[GOOD_JOBS // 2] == "FAILURE"
        if not right or again.state != "SUCCESS":
            found["problem"] = f"the bad job: {states[GOOD_JOBS // 2]}; afterwards {again.state}"
            found["output"] = worker.tail().splitlines()[-TAIL_LINES:]
    return found


@contextlib.contextmanager
def _worker(check: Check) -> Iterator[tuple[Celery, GuardedProcess]]:
    with EmbeddedRedis() as server:
        app = Celery("gpu_check", broker=server.url, backend=server.url, set_as_current=False)
        command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", f"{APP}:app", "worker"]
        worker = GuardedProcess(
            [*command, "-l", "INFO", "-Q", "fragile", "--without-mingle", "--without-gossip"],
            env=child_environment(GPU_CHECK_REDIS=server.url, BATCHERY_DEVICES=check.device),
        )
        try:
            yield app, worker
        finally:
            app.close()
            worker.stop(5.0)


def requests(check: Check) -> dict[str, Any]:
    """Single requests and 150 callers through the whole system."""
    model, count = ("tiny", "4") if check.dry else ("bert-large", "150")
    # The one that matters most comes first.
    options = ["--model", model, "--concurrency", count, "1", "--rounds", "1"]
    options += [
        "--warm-up",
        *(["0.1", "--seconds", "0.2"] if check.dry else ["2", "--seconds", "5"]),
    ]
    found = _benchmark(check, "engine.requests", options)
    rows = {(row["system"], row["concurrency"]): row for row in found.get("rows", [])}
    many = rows.get(("batched", int(count)))
    if many is None:
        found.setdefault("problem", "no rows")
        return found
    found["note"] = (
        f"{count} callers: {many['texts_per_s']:,} texts/s, {many.get('of_one_by_one')} times one"
        f" by one, p99 {many['p99_ms']} ms"
    )
    lonely = rows.get(("batched", 1))
    if lonely is not None:
        found["note"] += (
            f"; one caller: p50 {lonely['p50_ms']} ms, {lonely['p50_of_bare']} of a bare forward"
        )
    return found


def bulk(check: Check) -> dict[str, Any]:
    """Twenty thousand texts by loops, by the device alone and by the whole system."""
    model, count = ("tiny", "40") if check.dry else ("bert-base", "20000")
    options = ["--model", model, "--texts", count, "--rounds", "1", "--batch-size", "256"]
    systems = [
        "loop: packed",
        "in process",
        *([] if check.dry else ["loop: token budget", "whole"]),
    ]
    options += ["--workloads", "log-normal", "--systems", *systems]
    measured_flops = product_flops(check)["sustained"]
    found = _benchmark(check, "engine", options)
    for row in found.get("rows", []):
        # Not of what the data sheet says, which no product reaches.
        row["of_measured_flops"] = round(row["flops_per_s"] / measured_flops, 4)
    found["note"] = "; ".join(
        f"{row['system']}: {row['texts_per_s']:,}" for row in found.get("rows", [])
    )
    return found


def _benchmark(check: Check, name: str, options: Sequence[str]) -> dict[str, Any]:
    """The report of a benchmark; of one that takes too long, what it has measured by then."""
    path = check.folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--device", check.device]
    limit_s = check.limit_s - REPORT_S
    problem, lines = "", []
    try:
        done = _run([*command, *options, "--json", str(path)], limit_s)
        lines = (done.stdout + done.stderr).splitlines()
        problem = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"cut off after {limit_s:g} s"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return report | ({"problem": problem, "output": lines[-TAIL_LINES:]} if problem else {})


def _run(
    command: Sequence[str], limit_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s
    )


#: As in `kernels.py`.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "tests/gpu": gpu_tests,
    "dead context": dead_context,
    "requests": requests,
    "bulk": bulk,
}
