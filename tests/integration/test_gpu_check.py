"""The check of a GPU works; what it finds is not a matter for tests."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from support.bench_command import bench
from support.patience import patient

#: A dozen processes that load torch, on a machine that may be busy; a quiet one needs one minute.
pytestmark = pytest.mark.timeout(500)

TIMEOUT_S = patient(480)


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
