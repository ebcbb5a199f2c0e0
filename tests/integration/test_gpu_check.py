"""The check of a GPU works; what it finds is not a matter for tests."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from support.bench_command import bench
from support.patience import patient

#: A dozen processes that load torch, on a machine that may be busy; a quiet one needs one minute.
pytestmark = pytest.mark.timeout(500)

TIMEOUT_S = patient(480)

#: In the place of the check's steps: the first is fine, and others raise, die or hang.
STEPS = """
import json, os, sys, time
for name in sys.argv[sys.argv.index("--steps") + 1:]:
    if name == "graphs":
        print("a last word", flush=True)
        os._exit(3)
    if name == "memory flat":
        time.sleep(600)
    print("noise")
    print("gpu-check: " + json.dumps({"status": "ok", "note": f"{name} | here"}), flush=True)
"""


def test_a_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    reports = [f"--json={tmp_path / 'check.json'}", f"--page={tmp_path / 'check.md'}"]
    answer = bench("gpu_check", "--dry", *reports, timeout_s=TIMEOUT_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    steps = json.loads((tmp_path / "check.json").read_text())["steps"]
    assert list(steps) == list(gpu_check.LIMITS_S)
    assert {step["status"] for step in steps.values()} == {"ok"}
    page = (tmp_path / "check.md").read_text()
    assert all(f"## {name}\n" in page for name in steps)
    # The table of requests has a row for each concurrency.
    rows = steps["requests"]["rows"]
    assert [(row["system"], row["concurrency"]) for row in rows] == [
        ("bare forward", 1),
        ("one by one", 4),
        ("batched", 4),
        ("one by one", 1),
        ("batched", 1),
    ]
    for row in rows:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["texts_per_s"] <= fastest
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]


def test_no_step_keeps_others_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    monkeypatch.setattr(gpu_check, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setitem(gpu_check.LIMITS_S, "memory flat", 1)
    wanted = ["versions", "graphs", "memory flat", "bulk"]
    paths: Any = {"json": tmp_path / "check.json", "page": tmp_path / "check.md"}
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu_check", "--steps", *wanted, *(f"--{key}={path}" for key, path in paths.items())],
    )
    with pytest.raises(SystemExit):
        gpu_check.main()
    steps = json.loads(paths["json"].read_text())["steps"]
    statuses = {name: step["status"] for name, step in steps.items()}
    assert statuses == {
        "versions": "ok",
        "graphs": "ended its process",
        "memory flat": "took too long",
        "bulk": "ok",
    }
    assert steps["graphs"]["output"] == ["noise", "a last word"]
    assert "| bulk | ok |" in paths["page"].read_text()
