"""Each benchmark runs to its end and reports what it says; how fast anything is, is no test."""

import json
from pathlib import Path

from support.bench_command import bench


def test_scheduling_compares_all_policies_on_the_same_jobs(tmp_path: Path) -> None:
    target = tmp_path / "scheduling.json"
    done = bench("scheduling", "--jobs=5000", "--seeds=1", "--workloads=bulk", f"--json={target}")
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(target.read_text())["rows"]}
    assert {"ours", "target", "shedding", "fixed", "clipper", "bento", "priority"} == set(rows)
    # Live jobs beside bulk are what the scheduler is for.
    assert rows["ours"]["missed"] < 0.2 < rows["fixed"]["missed"]
