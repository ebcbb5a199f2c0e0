"""The benchmarks of the scheduler work; what they measure is not a matter for tests."""

import json
from pathlib import Path

import pytest

from benchmarks.scheduling.learning import Ran, collect_batches, gaps_ms, learned
from benchmarks.scheduling.messages import Template
from benchmarks.scheduling.playing import Call, Heard, Played
from support.bench_command import bench

TEMPLATE = Template("queue", "")


def batch(number: int, heard_s: float, items: int, forward_ms: float) -> list[tuple[Call, Heard]]:
    """Jobs that came together and had waited for as long as they were computed."""
    info = {
        "id": f"b{number}",
        "device": "cpu:0",
        "size": items,
        "forward_ms": forward_ms,
        "prepare_ms": 0.0,
        "queued_ms": 0.1,
        "waited_ms": forward_ms,
    }
    due_s = heard_s - 2 * forward_ms / 1e3
    job = Call(due_s, "high", TEMPLATE, ""), Heard("high", heard_s - due_s, info)
    return [job] * items


def test_costs_gap_and_way_are_learned_from_what_clients_see() -> None:
    """Batches take 10 ms and 2 ms for each item, devices stand still for 5 ms in between."""
    heard_s, jobs = 0.0, []
    for number in range(50):
        items = number % 7 + 1
        forward_ms = 10.0 + 2.0 * items
        heard_s += (5.0 + forward_ms) / 1e3
        jobs += batch(number, heard_s, items, forward_ms)
    calls, heard = zip(*jobs, strict=True)
    alone = [Heard("high", 0.019, {"id": "b99", "size": 1, "forward_ms": 12.0})]
    costs = learned(calls, Played(heard, heard_s, []), Played(alone, 1.0, []))
    assert costs.pass_ms == pytest.approx(10.0, rel=0.05)
    assert costs.item_ms == pytest.approx(2.0, rel=0.05)
    assert costs.noise < 0.02
    assert costs.prepare_ms == pytest.approx(5.0)
    assert costs.overhead_ms == pytest.approx(2.0)
    assert [each.items for each in collect_batches(calls, heard)][:8] == [1, 2, 3, 4, 5, 6, 7, 1]


@pytest.mark.parametrize(
    ("queued_ms", "waited_ms", "gaps"),
    [
        pytest.param(0.1, 20.0, [5.0], id="a job waited for the device"),
        pytest.param(0.1, 1.0, [], id="nothing waited, so the device was idle"),
        pytest.param(9.0, 20.0, [], id="the batch was sent before"),
    ],
)
def test_a_gap_counts_where_the_device_stood_still_although_a_job_was_there(
    queued_ms: float, waited_ms: float, gaps: list[float]
) -> None:
    first = Ran("cpu:0", 1.0, 1, 0, 10.0, 0.0, 0.0)
    elsewhere = Ran("cpu:1", 1.01, 1, 0, 10.0, 0.0, 0.0)
    second = Ran("cpu:0", 1.015, 1, 0, 10.0, queued_ms, waited_ms)
    assert list(gaps_ms([first, elsewhere, second])) == pytest.approx(gaps)


def test_the_simulator_is_held_against_a_real_worker(tmp_path: Path) -> None:
    target = tmp_path / "reality.json"
    options = ["--only=short", "--seconds=2", "--noise-seeds=1", f"--json={target}"]
    answer = bench("scheduling.reality", *options)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert report["hardware"]["cores"]
    assert [row["load"] for row in report["rows"]] == [0.6, 0.9]
    for row in report["rows"]:
        assert row["learned"]["pass_ms"] > 0
        for found in (row["real"], row["simulated"]):
            assert found["items_per_s"] > 0
            assert list(found["classes"]) == ["high", "low", "normal"]
            for each in (found, *found["classes"].values()):
                assert 0 < each["p50_ms"] <= each["p95_ms"] <= each["p99_ms"]
        assert [each["claim"].split(": ")[1][:3] for each in row["verdicts"]] == ["thr", "p99"]
