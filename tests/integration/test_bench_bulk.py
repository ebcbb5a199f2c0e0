"""The bulk benchmark works; what it measures is not a matter for tests."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_bulk_benchmark_measures_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    batchery = str(Path(sys.executable).with_name("batchery"))
    options = ["--items=300", "--rounds=1", "--what=publish", f"--json={target}"]
    answer = subprocess.run(
        [batchery, "bench", "bulk", *options],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
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
