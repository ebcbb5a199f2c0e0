"""`batchery simulate`: what it prints, and what it refuses."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchery import DatasetError, StartError
from batchery_worker.cli.simulate import MAX_JOBS, POLICIES, SLOT_POLICIES, simulate
from batchery_worker.simulator.workload import WORKLOADS

#: Options that make no sense -> what is told of them.
WRONG = {
    "--devices 0": "0 is not in the range 1<=x<=1000",
    "--devices 1001": "1001 is not in the range 1<=x<=1000",
    "--load 0": "0.0 is not in the range 0.001<=x<=1000",
    "--load nan": "nan is no number that has an end",
    "--seconds inf": "inf is not in the range 1e-09<=x<=1000000000",
    "--target-ms -1": "-1.0 is not in the range 1e-09<=x<=1000000000",
    "--pass-ms 1e308": "1e+308 is not in the range 0<=x<=1000000000",
    "--item-ms x": "'x' is not a valid float range",
    "--load 0.5 --rate 10": "--load and --rate say the same",
    "--pass-ms 0 --item-ms 0": "--pass-ms and --item-ms are both 0",
    "--kill 4@1": "--kill 4: the last device is 3",
    "--slow 1": "'1': expected a device and a number, such as 0@2.5",
    "--slow 1@0": "0.0 is not in the range 0.001<=x<=1000",
    "--slow a@2": "'a@2': expected a device and a number",
    "--policies ours,theirs": "no policy 'theirs'; there are ours, target, shedding",
    "--workload none": "'none' is not one of 'poisson'",
    "--rate 1e9 --seconds 1e9": f"more than {MAX_JOBS:,} jobs",
    "--trace no-such-file": "'no-such-file' does not exist",
    "--cost task 1 2": "--cost is of a task of a trace; use --pass-ms and --item-ms",
    "--token-ms 1": "--token-ms is of the tokens of a trace, and no job here has any",
    "--cost task 1": "Option '--cost' requires 3 arguments",
    "--cost task -1 2": "-1.0 is not in the range 0<=x<=1000000000",
    "--slots 0": "0 is not in the range 1<=x<=1000000",
    "--slots 8 --kill 0@1": "--slots goes without --kill",
    "--slots 8 --policies fixed": "no policy 'fixed'; there are ours, preempting, static",
}


def run(*args: str, jobs: int = 500) -> Any:
    return CliRunner().invoke(simulate, [*args, "--jobs", str(jobs)])


def report(*args: str, jobs: int = 500) -> Any:
    done = run(*args, "--json", "-", jobs=jobs)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_runs_with_every_policy(workload: str) -> None:
    found = report("--workload", workload, "--policies", "all")
    assert [each["policy"] for each in found["policies"]] == list(POLICIES)
    for each in found["policies"]:
        jobs = sum(row["jobs"] for row in each["classes"].values())
        assert jobs == 500 == each["done"] + round(each["shed"] * jobs)
        assert 0 < each["utilisation"] <= 1


def test_the_table_names_policies_and_what_they_missed() -> None:
    done = run("--workload", "bulk", "--deadline-ms", "50")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("bulk, 4,876 jobs/s on 4 devices that can do 6,095 items/s")
    for words in ("ours", "fixed", "missed", "deadline", "Jobs of the class low have none"):
        assert words in done.stdout
    assert all(len(line) <= 80 for line in lines)


def test_the_same_seed_gives_the_same_report_and_another_seed_another() -> None:
    args = ("--workload", "tenants", "--noise", "0.3")
    assert report(*args) == report(*args)
    assert report(*args)["policies"] != report(*args, "--seed", "1")["policies"]


def test_load_is_a_share_of_what_the_devices_can_do() -> None:
    found = report("--devices", "2", "--pass-ms", "0", "--item-ms", "1", "--load", "0.5")
    assert (found["capacity_items_per_s"], found["jobs_per_s"]) == (2000.0, 1000.0)
    assert report("--rate", "70", "--items", "3")["jobs_per_s"] == 70.0


def test_devices_may_be_slow_and_may_die() -> None:
    found = report("--kill", "0@0.01", "--slow", "1@2", "--policies", "ours")["policies"][0]
    assert found["rerun"] > 0
    assert (found["done"], found["left"]) == (500, 0)


def test_jobs_that_nobody_did_are_told() -> None:
    done = run("--devices", "1", "--kill", "0@0.01", "--policies", "ours")
    assert done.exit_code == 0, done.output
    assert "jobs were never done: no device was left" in done.stdout


def test_a_trace_is_played_by_all_policies(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"time_s": n / 100, "class": "low", "deadline_s": 0.02} for n in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = report("--trace", str(path), jobs=150)
    assert [each["done"] for each in found["policies"]] == [150, 150]
    assert found["workload"] is None
    done = run("--trace", str(path), "--load", "1")
    assert done.exit_code == 2
    assert "--trace has its own jobs; leave out --load" in done.stderr


def test_names_of_a_trace_are_printed_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "[bold]trace.jsonl"
    rows = [{"time_s": n, "tenant": name} for n, name in enumerate(["[/red]", "[red]", ":key:"])]
    path.write_text("\n".join(map(json.dumps, rows)))
    done = run("--trace", str(path))
    assert done.exit_code == 0, done.output
    for name in (path.name, "[/red]", "[red]", ":key:"):
        assert name in done.stdout


def test_a_broken_trace_and_one_without_jobs_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time_s": 1}\n{"time_s": -1}\n')
    done = run("--trace", str(path))
    assert isinstance(done.exception, DatasetError)
    assert f"{path}:2: time_s is -1" in str(done.exception)
    path.write_text("")
    done = run("--trace", str(path))
    assert isinstance(done.exception, StartError)
    assert "there are no jobs" in str(done.exception)


@pytest.fixture
def two_tasks(tmp_path: Path) -> Path:
    """A trace of a cheap task and a dear one, in turn."""
    path = tmp_path / "trace.jsonl"
    rows = [{"time_s": n / 100, "task": "dear" if n % 2 else "cheap"} for n in range(200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_each_task_of_a_trace_may_have_its_own_cost(two_tasks: Path) -> None:
    args = ("--trace", str(two_tasks), "--devices", "2", "--max-batch-size", "10", "--pass-ms", "5")
    found = report(*args, "--item-ms", "0", "--policies", "all")
    assert found["capacity_items_per_s"] == 4000.0
    dear = report(*args, "--item-ms", "0", "--policies", "all", "--cost", "dear", "25", "2")
    # A full batch of one takes 5 ms, of the other 45; half of the items are of each.
    assert dear["capacity_items_per_s"] == 800.0
    assert dear["cost"] == [["dear", 25.0, 2.0]]
    for before, after in zip(found["policies"], dear["policies"], strict=True):
        assert after["done"] + round(200 * after["shed"]) == 200
        assert after["utilisation"] > 2 * before["utilisation"]


def test_tokens_of_a_trace_take_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"time_s": {n}, "tokens": {10 * n + 10}}}\n' for n in range(9)))
    costs = ("--pass-ms=10", "--item-ms=0", "--token-ms=1", "--max-batch-size=1", "--devices=1")
    found = report("--trace", str(trace), "--policies", "ours", *costs)
    # 50 tokens on average, with a pass of 10 ms.
    assert found["capacity_items_per_s"] == pytest.approx(1000 / 60, abs=0.01)
    (ours,) = found["policies"]
    assert ours["p50_ms"] == pytest.approx(60, abs=0.01)
    assert ours["p99_ms"] == pytest.approx(100, abs=0.01)


def test_costs_that_make_no_sense_are_refused_in_one_line(two_tasks: Path) -> None:
    wrong = {
        ("--cost", "other", "1", "2"): "--cost other: no such task in the trace; there are cheap,",
        ("--cost", "dear", "0", "0"): "--cost dear: both are 0; a batch takes some time",
        (*("--cost", "dear", "1", "2"), *("--cost", "dear", "1", "3")): "names a task twice",
    }
    for options, words in wrong.items():
        done = run("--trace", str(two_tasks), *options)
        assert done.exit_code == 2
        assert words in done.stderr.splitlines()[-1]


def test_classes_of_a_trace_are_those_of_the_settings(
    two_tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_tasks.write_text('{"time_s": 1, "class": "gold"}\n')
    done = run("--trace", str(two_tasks))
    assert "no class 'gold'; there are high, normal, low; others are those" in str(done.exception)
    monkeypatch.chdir(two_tasks.parent)
    (two_tasks.parent / "batchery.toml").write_text(
        "[classes]\ngold = { level = 0, share = 9 }\nrest = { level = 3, share = 1 }\n"
    )
    assert report("--trace", str(two_tasks))["shares"] == {"gold": 9.0, "rest": 1.0}
    # Workloads have classes of their own.
    assert report()["shares"].keys() == {"high", "normal", "low"}


@pytest.mark.parametrize("options", WRONG)
def test_options_that_make_no_sense_are_refused(options: str) -> None:
    done = CliRunner().invoke(simulate, options.split())
    assert done.exit_code == 2
    assert WRONG[options] in done.stderr.splitlines()[-1]


def test_with_slots_jobs_are_answered_as_they_end_and_the_first_step_is_told() -> None:
    options = ["--slots", "8", "--items", "50", "--spread", "0.8", "--devices", "1"]
    steady, preempting, static = report(*options)["policies"]
    assert [each["policy"] for each in (steady, preempting, static)] == [*SLOT_POLICIES]
    assert steady["p50_ms"] < static["p50_ms"]
    assert preempting["classes"]["high"]["first_p99_ms"] <= steady["first_p99_ms"]
    assert "first" in run(*options).output


def test_json_goes_to_a_file_beside_the_table(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run("--json", str(path))
    assert "ours" in done.stdout
    assert len(json.loads(path.read_text())["policies"]) == 2
    done = run("--json", str(tmp_path / "absent" / "report.json"))
    assert "report.json: cannot be written: No such file" in str(done.exception)


def test_the_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    done = [run("--plot", str(path)) for path in paths]
    if importlib.util.find_spec("matplotlib") is None:
        assert "--plot needs matplotlib" in str(done[0].exception)
    else:
        assert "<svg" in paths[0].read_text()
        assert paths[0].read_bytes() == paths[1].read_bytes()
        wrong = run("--plot", str(tmp_path / "plot.xyz"))
        assert "plot.xyz: cannot be drawn" in str(wrong.exception)
