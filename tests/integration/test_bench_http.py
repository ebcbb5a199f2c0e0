"""The benchmarks of the gateway work; what they measure is not a matter for tests."""

import json
from pathlib import Path

from support.bench_command import bench


def test_the_http_benchmark_measures_the_gateway(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    what = ["--models", "tiny", "--alone", "--connections", "1", "5", "--texts", "2"]
    answer = bench("http", *what, "--rounds=1", "--seconds=0.3", f"--write={target}")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert str(tmp_path) not in target.read_text()
    assert [row["connections"] for row in report["rows"]] == [1, 5]
    for row in report["rows"]:
        assert row["wrong"] == 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["requests_per_s"] > 0
        assert set(row["cpu_us_per_request"]) == {"gateway", "worker", "device", "redis"}


def test_callers_are_served_under_attack(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    few = ["--connections=80", "--seconds=6", f"--write={target}"]
    answer = bench("http.attack", *few)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert set(report["opened"]) >= {"idle", "slow_head", "slow_body", "garbage", "reset", "deaf"}
    for phase in report["phases"].values():
        assert set(phase["statuses"]) == {"200"}
        assert phase["lost"] == 0


def test_the_benchmark_of_spinning_threads_measures_a_count_beside_neighbours(
    tmp_path: Path,
) -> None:
    target = tmp_path / "figures.json"
    what = ["--model=tiny", "--spins", "1000", "--neighbours", "0", "1"]
    few = ["--connections=2", "--rounds=1", "--seconds=0.3", f"--write={target}"]
    answer = bench("http.spinning", *what, *few)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(target.read_text())["rows"]
    cases = [(row["neighbours"], row["spins"]) for row in rows]
    assert cases == [(0, "1000"), (1, "1000")]
    assert all(row["wrong"] == 0 < row["requests_per_s"] for row in rows)
