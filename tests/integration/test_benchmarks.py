"""Each benchmark runs to its end and reports what it says; how fast anything is, is no test."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.redis_cluster import find_cluster_server
from support.bench_command import bench
from support.patience import patient

#: Several processes that load torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(patient(400))

TIMEOUT_S = patient(380)

#: Options of the benchmarks of generation.
GENERATION = ("--model=tiny", "--threads=1", "--slots=4", "--longest=24", "--parts")


@pytest.fixture
def report(tmp_path: Path) -> Any:
    """Runs a benchmark; returns what it has written."""

    def run(name: str, *options: str) -> Any:
        target = tmp_path / "figures.json"
        done = bench(name, *options, f"--json={target}", timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        found = json.loads(target.read_text())
        assert {"machine", "cores", "memory_gib", "python"} <= set(found["hardware"])
        # Figures are published: they name no folder of the machine.
        assert str(tmp_path) not in target.read_text()
        return found

    return run


def test_queue_measures_the_rows_that_are_asked_for(report: Any) -> None:
    rows = ("--systems", "celery threads", "Redis alone, 64")
    found = report("queue", "--jobs=400", "--rounds=1", "--calls=2", *rows)
    assert [row["system"] for row in found["rows"]] == [
        "celery threads -c 4",
        "Redis alone, 64 at a time",
    ]
    assert found["rows"][0]["call_p50_ms"] <= found["rows"][0]["call_p99_ms"]


@pytest.mark.skipif(find_cluster_server() is None, reason="no Redis 7 or newer is installed here")
def test_a_cluster_has_figures_of_each_node_beside_those_of_one_server(report: Any) -> None:
    rows = report("queue.cluster", "--jobs=400", "--rounds=1")["rows"]
    assert [row["system"] for row in rows] == ["one server", "four nodes"]
    assert [len(row["node_us_per_job"]) for row in rows] == [1, 4]


def test_bulk_measures_the_rows_that_are_asked_for(report: Any) -> None:
    few = ("--items=300", "--rounds=1", "--max-items=500", "--what=publish")
    found = report("bulk", *few, "--systems", "delay", "batchery")
    assert [row["how"] for row in found["rows"]] == ["delay", "batchery", "map, 500 jobs"]
    assert all(row["peak_mib"] > 0 for row in found["rows"])


def test_engine_measures_loops_device_and_whole_system(report: Any) -> None:
    few = ("--model=tiny", "--threads=2", "--texts=40", "--rounds=1", "--workloads", "bimodal")
    found = report("engine", *few, "--systems", "loop: arrival", "loop: packed", "device", "whole")
    rows = {row["system"]: row for row in found["rows"]}
    assert rows["loop: packed"]["padding_waste"] == 0 < rows["loop: arrival order"]["padding_waste"]
    assert set(rows["whole system"]["cpu_ms_per_text"]) == {"worker", "device", "redis"}


def test_load_says_how_long_jobs_waited_and_what_memory_did(report: Any) -> None:
    found = report("load", "--model=tiny", "--threads=1", "--capacity=50", "--seconds=4")
    assert (found["failed_jobs"], found["jobs"] > 0) == (0, True)
    for row in found["rows"]:
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["longest_ms"]
    assert set(found["memory"]) == {"worker", "device", "redis"}


def test_scheduling_compares_all_policies_on_the_same_jobs(report: Any) -> None:
    found = report("scheduling", "--jobs=5000", "--seeds=1", "--workloads=bulk")
    rows = {row["policy"]: row for row in found["rows"]}
    assert {"ours", "target", "shedding", "fixed", "clipper", "bento", "priority"} == set(rows)
    # Live jobs beside bulk are what the scheduler is for; time is virtual, so this is exact.
    assert rows["ours"]["missed"] < 0.2 < rows["fixed"]["missed"]


def test_live_jobs_are_answered_beside_bulk_that_waits_without_end(report: Any) -> None:
    few = ("--model=tiny", "--threads=1", "--seconds=5", "--per-job=16")
    (row,) = report("scheduling.live", *few)["rows"]
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["bulk_per_s"] > 0 < row["bulk_with_live_per_s"]


def test_generation_measures_each_way_to_the_same_texts(report: Any) -> None:
    systems = ("generate_batch", "our engine", "through the queue")
    few = ("--texts=8", "--rounds=1", "--systems", *systems)
    found = report("generation", *GENERATION, "throughput", *few)["throughput"]
    rows = {row["system"]: row for row in found["rows"]}
    assert list(rows) == list(systems)
    # Greedy: all of them write the same.
    assert rows["through the queue"]["same_texts"] == "8 of 8"


def test_speech_says_the_same_in_each_way(report: Any) -> None:
    found = report("speech", "--recordings=3", "--rounds=1", "--longest=3", "--slots=3")
    assert list(found["rows"]) == ["one by one", "fixed batches", "slots"]
    assert all(0 < row["silence"] < 1 for row in found["rows"].values())
    (verdict,) = found["verdicts"]
    assert verdict["holds"]


def test_streams_give_every_piece_once_and_survive_their_reader(report: Any) -> None:
    few = ("--streams=8", "--seconds=2", "--step-ms", "100")
    found = report("generation", *GENERATION, "streams", *few)["streams"]
    (row,) = found["rows"]
    assert row["pieces"] == 8 * 20
    for each in (row, found["killed_reader"]):
        assert not each["missing"] + each["repeated"] + each["disordered"]


def test_live_chats_and_resume_are_counted(report: Any) -> None:
    few = ("--seconds=4", "--stretches=1", "--live-per-s=2", "--jobs=12", "--kill-rounds=1")
    found = report("generation", *GENERATION, "live", "resume", *few)
    assert found["live"]["row"]["chats"] > 0
    total = found["resume"]["total"]
    assert not total["failed"] + total["gaps"] + total["repeats"]


def test_inprocess_measures_ours_beside_a_lock(report: Any) -> None:
    few = ("--callers", "1", "5", "--rounds=2", "--seconds=0.02", "--workloads", "no-op")
    found = report("inprocess", *few, "--systems", "lock", "ours: batched")
    assert {row["system"] for row in found["rows"]} == {"lock", "ours: batched"}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in found["rows"])


def test_http_measures_the_gateway(report: Any) -> None:
    few = ("--connections", "1", "5", "--texts", "2", "--rounds=1", "--seconds=0.3")
    found = report("http", "--models", "tiny", "--alone", *few)
    assert [row["connections"] for row in found["rows"]] == [1, 5]
    for row in found["rows"]:
        assert (row["wrong"], row["requests_per_s"] > 0) == (0, True)
        assert set(row["cpu_us_per_request"]) == {"gateway", "worker", "device", "redis"}


def test_callers_are_served_under_attack(report: Any) -> None:
    found = report("http.attack", "--connections=80", "--seconds=6")
    assert set(found["opened"]) >= {"idle", "slow_head", "slow_body", "garbage", "reset", "deaf"}
    for phase in found["phases"].values():
        assert (set(phase["statuses"]), phase["lost"]) == ({"200"}, 0)


def test_images_measures_the_whole_system_beside_a_loop(report: Any) -> None:
    few = ("--model=tiny", "--pictures=40", "--rounds=1", "--batch-sizes", "8")
    found = report("images", *few)
    assert [row["system"] for row in found["rows"]] == ["bare loop, 8 a batch", "whole system"]
    assert found["largest_difference"] < 1e-4
