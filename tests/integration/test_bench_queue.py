"""The queue benchmark works; what it measures is not a matter for tests."""

import json
from pathlib import Path

import pytest

from batchery_worker.devstack.redis_server import free_port
from benchmarks.queue.systems import systems
from support.bench_command import bench


def test_the_queue_benchmark_measures_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--jobs=400", "--rounds=1", "--calls=2", f"--json={target}"]
    rows = ["celery threads", "Redis alone, 64"]
    answer = bench("queue", *options, "--systems", *rows)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert [row["system"] for row in report["rows"]] == [
        "celery threads -c 4",
        "Redis alone, 64 at a time",
    ]
    assert report["hardware"]["cores"]
    for row in report["rows"]:
        slowest, fastest = row["spread"]
        assert 0 < slowest <= row["jobs_per_s"] <= fastest
    assert report["rows"][0]["call_p50_ms"] <= report["rows"][0]["call_p99_ms"]


def test_others_may_have_as_many_processes_as_ours_and_what_reads_answers_for_ours() -> None:
    rows = {row.name: row for row in systems("batchery") if row.requirements}
    for name in ("Dramatiq 2.2", "SAQ 0.26", "taskiq 0.13"):
        assert "2" in rows[f"{name}, 2 processes"].worker
        assert "2" not in rows[name].worker
    assert all(any("hiredis" in each for each in row.requirements) for row in rows.values())


def test_a_broker_of_the_shell_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.setenv(name, f"redis://127.0.0.1:{free_port()}/0")
    options = ["--jobs=100", "--rounds=1", "--calls=2", "--systems", "celery solo"]
    answer = bench("queue", *options)
    assert answer.returncode == 0, answer.stderr


def test_the_queue_benchmark_names_its_rows_when_asked_for_another() -> None:
    answer = bench("queue", "--systems", "nonsense", timeout_s=60)
    assert answer.returncode == 1
    assert "choose from batchery, " in answer.stderr


def test_the_benchmark_of_tenants_prints_what_each_number_of_them_costs() -> None:
    answer = bench("queue.tenants", "--jobs=2000", "--rounds=2")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 6


def test_the_benchmark_of_scrapes_compares_workers_with_and_without_a_port(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ["--jobs=1000", "--rounds=1", "--every=0.1", f"--json={target}"]
    answer = bench("queue.scrape", *options)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert [row["name"] for row in report["rows"]] == ["no port", "a port", "a port, scraped"]
    assert report["rows"][0]["ratio"] == 1
    assert all(row["jobs_per_s"] > 0 for row in report["rows"])
    assert report["scrapes"] > 0


def test_the_benchmark_of_growth_has_a_row_for_each_step_beside_celery(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    answer = bench("queue.growth", "--jobs=20", "--rounds=1", "--cuts=1", f"--json={target}")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["step"] for row in rows if row["system"] == "batchery"] == [
        *("start", "batch.succeed", "batch.fail", "batch.retry"),
        *("ordinary.succeed", "ordinary.fail", "ordinary.retry", "cuts"),
    ]
    assert {row["step"] for row in rows if row["system"] == "celery"} < {
        row["step"] for row in rows if row["system"] == "batchery"
    }
    assert all(row["main_mib"] > 10 < row["pool_mib"] for row in rows)
