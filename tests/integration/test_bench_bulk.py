"""The bulk benchmark works; what it measures is not a matter for tests."""

import json
from pathlib import Path

from bench_command import bench


def test_the_bulk_benchmark_measures_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--items=300", "--rounds=1", "--what=publish", f"--json={target}"]
    answer = bench("bulk", *options)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert [row["how"] for row in report["rows"]] == [
        "delay",
        "Producer.batch",
        "Producer.batch, results ignored",
        "batchery",
    ]
    assert report["hardware"]["cores"]
    for row in report["rows"]:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["items_per_s"] <= fastest
        assert row["peak_mib"] > 0
