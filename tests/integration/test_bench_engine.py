"""The engine's benchmarks work; what they measure is not a matter for tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench_command import bench

#: Four processes that load torch, on a machine that may be busy; a quiet one needs ten seconds.
pytestmark = pytest.mark.timeout(400)

#: Longest run of the command, in seconds.
TIMEOUT_S = 380


def rows_of(target: Path) -> list[dict[str, Any]]:
    report = json.loads(target.read_text())
    assert report["hardware"]["cores"]
    for row in report["rows"]:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["texts_per_s"] <= fastest
    rows: list[dict[str, Any]] = report["rows"]
    return rows


def test_the_engine_benchmark_measures_loops_device_and_whole_system(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--model=tiny", "--threads=1", "--texts=40", "--rounds=1", f"--json={target}"]
    answer = bench(
        "engine",
        *options,
        "--workloads",
        "bimodal",
        "--systems",
        "loop",
        "device",
        "whole",
        timeout_s=TIMEOUT_S,
    )
    assert answer.returncode == 0, answer.stderr
    rows = {row["system"]: row for row in rows_of(target)}
    assert list(rows) == [
        "loop: arrival order",
        "loop: sorted",
        "loop: token budget",
        "loop: packed",
        "device, fed directly",
        "whole system",
    ]
    assert {row["workload"] for row in rows.values()} == {"bimodal"}
    naive, packed = rows["loop: arrival order"], rows["loop: packed"]
    assert packed["padding_waste"] == 0 < naive["padding_waste"]
    assert all(0 <= row["padding_waste"] <= naive["padding_waste"] for row in rows.values())
    assert naive["of_naive_loop"] == 1
    assert set(rows["whole system"]["cpu_ms_per_text"]) == {"worker", "device", "redis"}


def test_the_table_of_requests_has_a_row_for_each_concurrency(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--model=tiny", "--threads=1", "--requests=20", "--rounds=1", f"--json={target}"]
    answer = bench("requests", *options, "--concurrency", "1", "10", timeout_s=TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr
    rows = rows_of(target)
    assert [(row["system"], row["concurrency"]) for row in rows] == [
        ("bare forward", 1),
        ("one by one", 1),
        ("batched", 1),
        ("one by one", 10),
        ("batched", 10),
    ]
    assert all(row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] for row in rows)


def test_the_engine_benchmark_names_its_rows_when_asked_for_another() -> None:
    answer = bench("engine", "--systems", "nonsense", timeout_s=TIMEOUT_S)
    assert answer.returncode == 1
    assert "choose from loop: arrival order, " in answer.stderr
