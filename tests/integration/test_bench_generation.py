"""The benchmark of generation works; what it measures is not a matter for tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generation.ledger import Counts, read_counts
from benchmarks.generation.live import Ended
from benchmarks.generation.resume import Read, row_for
from benchmarks.generation.streams import count_faults, measure_rate
from benchmarks.generation.workload import NEW_TOKENS, draw_texts
from support.bench_command import bench
from support.patience import patient

#: Processes that load torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(patient(400))

TIMEOUT_S = patient(380)

SMALL = ("--model=tiny", "--threads=1", "--slots=4", "--longest=24")


def run_part(target: Path, part: str, *options: str) -> dict[str, Any]:
    answer = bench(
        "generation", "--parts", part, *SMALL, *options, f"--json={target}", timeout_s=TIMEOUT_S
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert report["hardware"]["cores"]
    for verdict in report[part]["verdicts"]:
        assert verdict["claim"] in answer.stdout
    found: dict[str, Any] = report[part]
    return found


def test_throughput_has_a_row_for_each_way(tmp_path: Path) -> None:
    systems = ("one by one", "generate_batch", "our engine", "through the queue")
    options = ("--texts=8", "--rounds=1", "--one-in=2", "--systems", *systems)
    report = run_part(tmp_path / "rows.json", "throughput", *options)
    rows = {row["system"]: row for row in report["rows"]}
    assert list(rows) == list(systems)
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    # Greedy: all of them write the same.
    assert rows["through the queue"]["same_texts"] == "8 of 8"
    assert rows["one by one"]["same_texts"] == "4 of 4"


def test_streams_give_every_piece_once_and_survive_their_reader(tmp_path: Path) -> None:
    options = ("--streams=8", "--seconds=2", "--step-ms", "100")
    report = run_part(tmp_path / "streams.json", "streams", *options)
    (row,) = report["rows"]
    assert row["pieces"] == 8 * 20
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
    assert set(row["cpu_us_per_piece"]) == {"worker", "device", "redis", "reader"}
    for found in (row, report["killed_reader"]):
        assert not found["missing"] + found["repeated"] + found["disordered"]
    assert 0 < report["killed_reader"]["before_kill"] < report["killed_reader"]["pieces"]


def test_streams_may_take_turns() -> None:
    row = measure_rate(4, 50.0, 1.0, in_slots=2)
    assert (row["pieces"], row["asked_per_s"]) == (4 * 10, 40)
    assert row["pieces_per_s"] > 0
    assert not row["missing"] + row["repeated"] + row["disordered"]


def test_live_counts_chats_and_the_parts_of_classes(tmp_path: Path) -> None:
    options = ("--seconds=4", "--stretches=1", "--live-per-s=2")
    report = run_part(tmp_path / "live.json", "live", *options)
    assert report["row"]["chats"] > 0
    assert report["row"]["first_p50_ms"] <= report["row"]["first_p99_ms"]
    assert report["row"]["bulk_tokens_per_s"] > 0
    assert sum(each["part"] for each in report["shares"].values()) == pytest.approx(1, abs=0.01)


def test_resume_kills_and_finds_every_text_whole(tmp_path: Path) -> None:
    options = ("--jobs=12", "--kill-rounds=1")
    report = run_part(tmp_path / "resume.json", "resume", *options)
    total = report["total"]
    assert not total["failed"] + total["gaps"] + total["repeats"]


def test_steps_are_taken_apart_for_each_attention(tmp_path: Path) -> None:
    report = run_part(tmp_path / "steps.json", "steps", "--max-length=256")
    (row,) = report["rows"]
    # A CPU has no other.
    assert row["attention"] == "sdpa"
    assert 0 < sum(row["parts_ms"].values()) < 2 * row["step_ms"]
    assert row["tokens_per_s"] > 0


def test_texts_are_drawn_the_same_every_time_and_within_bounds() -> None:
    texts = draw_texts(200)
    assert texts == draw_texts(200) != draw_texts(200, seed="others")
    lengths = [text.max_new_tokens for text in texts]
    assert NEW_TOKENS[0] <= min(lengths) < max(lengths) <= NEW_TOKENS[1]
    assert max(text.max_new_tokens for text in draw_texts(50, 32)) == 32


def test_faults_of_streams_are_counted() -> None:
    good = [(f"{number}-0", number, 0.0, 1.0) for number in range(4)]
    assert count_faults({"a": good, "b": good}, 2, 4) == {
        "missing": 0,
        "repeated": 0,
        "disordered": 0,
    }
    bad = [good[0], good[2], good[1], good[1]]
    assert count_faults({"a": bad}, 2, 4) == {"missing": 5, "repeated": 1, "disordered": 1}


def test_faults_of_resumed_texts_are_counted(tmp_path: Path) -> None:
    def read(text: str, tokens: list[int]) -> Read:
        return Read(text, tokens, {"text": "abc", "tokens_out": 3})

    whole = read("abc", [1, 2, 3])
    found = [whole, read("ac", [1, 3]), read("abbc", [1, 2, 2, 3]), Read("a", [1], None, "lost")]
    row = row_for([whole] * 4, found, Counts(0, 0, 0), Counts(13, 4, 1))
    assert (row["failed"], row["gaps"], row["repeats"], row["other_texts"]) == (1, 1, 1, 2)
    assert (row["recomputed_tokens"], row["fed_again_tokens"], row["resumes"]) == (3, 4, 1)
    assert row["errors"] == ["lost"]
    (tmp_path / "1.jsonl").write_text('{"generated": 3}\n{"fed_again": 2}\n{"gener')
    assert read_counts(tmp_path) == Counts(3, 2, 1)


def test_tokens_of_a_text_at_the_edge_count_in_part() -> None:
    text = Ended(begin_s=10.0, end_s=20.0, tokens=100)
    assert text.within(0.0, 30.0) == 100
    assert text.within(15.0, 30.0) == 50
    assert text.within(12.0, 13.0) == 10
    assert text.within(20.0, 30.0) == 0
