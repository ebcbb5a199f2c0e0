"""The benchmark of in-process batchers works; what it measures is not a matter for tests."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inprocess.rows import Place, row_of
from benchmarks.peers.inprocess_peer import Plan, in_threads, read_figures
from benchmarks.peers.inprocess_workloads import Workload, workload_of
from support.bench_command import bench


@pytest.fixture
def no_op() -> Workload:
    return workload_of("no-op", Namespace())


def test_the_inprocess_benchmark_measures_ours_beside_a_lock(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    workloads = [
        "--workloads",
        "no-op",
        "sleep",
        "--systems",
        "lock",
        "ours",
        "--callers",
        "1",
        "5",
    ]
    short = ["--rounds=2", "--seconds=0.02", "--idle=0.1", f"--write={target}"]
    answer = bench("inprocess", *workloads, *short)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert report["hardware"]["cores"]
    assert report["command"].startswith("python -m benchmarks.inprocess --workloads no-op sleep")
    assert str(tmp_path) not in target.read_text()
    assert report["skipped"]
    assert set(report["versions"]) == {"lock", "ours: batched"}
    assert {
        (row["system"], row["workload"], row["mode"], row["callers"]) for row in report["rows"]
    } == {
        (system, workload, mode, callers)
        for system in ("lock", "ours: batched")
        for workload in ("no-op", "sleep")
        for mode in ("threads", "asyncio")
        for callers in (1, 5)
    }
    for row in report["rows"]:
        check(row, rounds=2)
    for row in report["idle"]:
        assert row["wakeups_per_s"] >= 0
        assert row["cpu_ms_per_s"] >= 0


def check(row: dict[str, Any], rounds: int) -> None:
    slowest, fastest = row["spread"]
    assert 0 < slowest <= row["items_per_s"] <= fastest
    assert 0 <= row["p50_ms"] <= row["p99_ms"]
    assert row["cpu_us_per_item"] > 0
    assert (row["wrong"], row["error"]) == (0, "")
    assert [each["wrong"] for each in row["rounds"]] == [0] * rounds
    assert all(each["items"] >= 2 * row["callers"] for each in row["rounds"])
    assert ("overhead_us" in row) == (row["callers"] == 1)


def test_the_inprocess_benchmark_compares_vectors_of_minilm(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    few = ["--callers=2", "--modes=asyncio", "--rounds=1", "--seconds=0.02", "--idle=0.1"]
    options = ["--workloads=MiniLM", "--max-tokens=16", *few, f"--write={target}"]
    answer = bench("inprocess", *options, "--systems", "ours: batched, length=")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert report["tokens_per_text"]["longest"] == 16
    [row] = report["rows"]
    assert (row["system"], row["wrong"]) == ("ours: batched, length=", 0)
    assert row["rounds"][0]["items"] >= 4


def test_the_inprocess_benchmark_names_its_systems_when_asked_for_another() -> None:
    answer = bench("inprocess", "--systems", "nonsense", timeout_s=60)
    assert answer.returncode == 1
    assert "choose from no batching, lock, ours: batched" in answer.stderr


def test_answers_for_other_callers_count_as_wrong(no_op: Workload) -> None:
    last = [0]

    def late(item: int) -> int:
        answer, last[0] = last[0], item
        return answer

    tallies = in_threads(late, [no_op.items(0)], Plan(1, 0.0, answers=3))
    figures = read_figures(tallies, no_op)
    assert (figures["items"], figures["wrong"], figures["error"]) == (3, 3, "")


def test_callers_that_get_an_exception_count_as_wrong(no_op: Workload) -> None:
    tallies = in_threads(lambda item: item // 0, [no_op.items(0)], Plan(1, 0.0))
    figures = read_figures(tallies, no_op)
    row = row_of("x", Place("no-op", "threads", 1), [figures], compares=True)
    assert (row["wrong"], "ZeroDivisionError" in row["error"]) == (1, True)
    assert "items_per_s" not in row
