"""The engine's benchmarks work; what they measure is not a matter for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchery_worker.models.embedding import encoded_results
from benchmarks.engine import gpu
from benchmarks.peers.text_peer import encode
from support.bench_command import bench
from support.patience import patient

#: Three processes that load torch, on a machine that may be busy; a quiet one needs ten seconds.
pytestmark = pytest.mark.timeout(400)

#: Longest run of the command, in seconds.
TIMEOUT_S = patient(380)


def rows_of(target: Path) -> list[dict[str, Any]]:
    report = json.loads(target.read_text())
    assert report["hardware"]["cores"]
    for row in report["rows"]:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["texts_per_s"] <= fastest
    rows: list[dict[str, Any]] = report["rows"]
    return rows


@pytest.mark.parametrize(
    ("visible", "device", "watched"),
    [
        (None, "cuda", "0"),
        (None, "cuda:1", "1"),
        ("", "cuda:1", "1"),
        ("2,3", "cuda:1", "3"),
        ("GPU-8f6, GPU-99a", "cuda:0", "GPU-8f6"),
    ],
)
def test_the_gpu_that_is_watched_is_the_one_that_computes(
    visible: str | None, device: str, watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"--id={watched}" in gpu._command(device, "name")


def test_the_engine_benchmark_measures_loops_device_and_whole_system(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--model=tiny", "--threads=2", "--texts=40", "--rounds=1", f"--json={target}"]
    answer = bench(
        "engine",
        *options,
        "--workloads",
        "bimodal",
        "--systems",
        "loop",
        "device",
        "onnx",
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
        "loop: packed, side by side",
        "device, fed directly",
        "onnx: device, fed directly",
        "whole system",
    ]
    assert {row["workload"] for row in rows.values()} == {"bimodal"}
    lengths = json.loads(target.read_text())["tokens_per_text"]
    assert lengths["bimodal"]["count"] == 40
    assert 0 < lengths["bimodal"]["median"] < lengths["bimodal"]["longest"] <= 240
    naive, packed = rows["loop: arrival order"], rows["loop: packed"]
    assert packed["padding_waste"] == 0 < naive["padding_waste"]
    assert all(0 <= row["padding_waste"] <= naive["padding_waste"] for row in rows.values())
    assert naive["of_naive_loop"] == 1
    assert set(rows["whole system"]["cpu_ms_per_text"]) == {"worker", "device", "redis"}


def test_other_systems_write_their_vectors_as_the_device_does() -> None:
    vectors = np.random.default_rng(1).normal(size=(3, 384)).astype(np.float32)
    heads = [{"tokens": count} for count in (4, 5, 6)]
    expected = [each.json for each in encoded_results(heads, vectors)]
    assert encode(vectors, [4, 5, 6]) == expected


def test_the_load_benchmark_says_how_long_jobs_waited_and_what_memory_did(tmp_path: Path) -> None:
    target = tmp_path / "load.json"
    options = ["--model=tiny", "--threads=1", "--capacity=50", "--seconds=4", f"--json={target}"]
    answer = bench("load", *options, timeout_s=TIMEOUT_S)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    # 40 a second, by chance; the seed decides.
    assert 100 < report["jobs"] < 220
    assert report["failed_jobs"] == 0
    rows = {row["what"]: row for row in report["rows"]}
    assert rows["queue wait, at most"]["count"] == report["jobs"]
    assert 1 <= rows["forward, by batch"]["count"] <= report["jobs"]
    for row in rows.values():
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["longest_ms"]
    assert set(report["memory"]) == {"worker", "device", "redis"}
    assert report["memory_rows"]
    claims = {verdict["claim"]: verdict["holds"] for verdict in report["verdicts"]}
    assert claims["every job succeeds"]
    assert len(claims) == 6
    assert "two forward times" in answer.stdout


def test_the_engine_benchmark_names_its_rows_when_asked_for_another() -> None:
    answer = bench("engine", "--systems", "nonsense", timeout_s=TIMEOUT_S)
    assert answer.returncode == 1
    assert "choose from loop: arrival order, " in answer.stderr
