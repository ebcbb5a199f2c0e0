"""The bulk benchmark works; what it measures is not a matter for tests."""

import json
from pathlib import Path

from support.bench_command import bench


def test_the_bulk_benchmark_measures_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--items=300", "--rounds=1", "--max-items=500", "--what=publish", f"--json={target}"]
    answer = bench("bulk", *options, "--systems", "delay", "Producer.batch", "batchery")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert [row["how"] for row in report["rows"]] == [
        "delay",
        "Producer.batch",
        "Producer.batch, results ignored",
        "batchery",
        "map, 500 jobs",
    ]
    assert report["hardware"]["cores"]
    for row in report["rows"]:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["items_per_s"] <= fastest
        assert row["peak_mib"] > 0


def test_the_bulk_benchmark_names_its_rows_when_asked_for_another() -> None:
    answer = bench("bulk", "--systems", "nonsense", timeout_s=60)
    assert answer.returncode == 1
    assert "choose from delay, " in answer.stderr
