"""What is made of the workers' answers: lines of a trace, what is missing, a command to try."""

from typing import Any

import pytest

from batchery.cli import record as module
from batchery.cli.record import Recording
from batchery.protocol.recorded_job import RecordedJob


def job(message: str, time_s: float = 100.0, task: str = "embed", **fields: Any) -> RecordedJob:
    usual: dict[str, Any] = {"priority_class": "high", "tenant": "", "items": 1, "deadline_s": None}
    return RecordedJob(time_s, task, message=message, **{**usual, **fields})


def answer(*rows: RecordedJob, **fields: Any) -> dict[str, Any]:
    usual = {
        "recorder": "r1",
        "after": len(rows),
        "age_s": 500.0,
        # As JSON has them.
        "rows": [list(row) for row in rows],
        "missed": 0,
        "left": 0,
        "devices": 2,
        "costs": {},
        "max_batch_sizes": {row.task: 32 for row in rows},
        "queues": ["celery"],
    }
    return {**usual, **fields}


@pytest.fixture
def recording() -> Recording:
    made = Recording()
    assert made.add({"w1": answer()}, 0.0) == []
    return made


def test_a_line_has_what_a_trace_has_and_nothing_that_is_empty(recording: Recording) -> None:
    rows = job("a"), job("b", 103.5, priority_class="low", tenant="acme", items=3, deadline_s=0.0)
    assert recording.add({"w1": answer(*rows)}, 1.0) == [
        {"time_s": 100.0, "task": "embed", "class": "high", "items": 1},
        {
            "time_s": 103.5,
            "task": "embed",
            "class": "low",
            "items": 3,
            "tenant": "acme",
            "deadline_s": 0.0,
        },
    ]
    assert (recording.jobs, recording.last_s - recording.first_s) == (2, 3.5)
    assert recording.queues == {"celery"}


def test_each_worker_is_asked_for_what_follows_its_last_answer(recording: Recording) -> None:
    recording.add({"w1": answer(after=7), "w2": answer(recorder="r2", after=3)}, 1.0)
    assert recording.cursors == {"w1": ("r1", 7), "w2": ("r2", 3)}
    recording.add({"w2": answer(recorder="r2", after=4)}, 2.0)
    assert recording.cursors == {"w1": ("r1", 7), "w2": ("r2", 4)}


def test_a_job_that_goes_from_worker_to_worker_is_recorded_once(recording: Recording) -> None:
    lines = recording.add({"w1": answer(job("a")), "w2": answer(job("a"), job("b"))}, 0.0)
    assert len(lines) == 2
    assert recording.add({"w2": answer(job("a"))}, 1.0) == []
    assert recording.jobs == 2


def test_not_all_messages_are_remembered_for_ever(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    recording.add({"w1": answer(job("a"), job("b"), job("c"))}, 1.0)
    assert len(recording.add({"w1": answer(job("a"), job("c"))}, 2.0)) == 1


def test_what_workers_missed_is_counted(recording: Recording) -> None:
    recording.add({"w1": answer(missed=3)}, 1.0)
    # Started two seconds ago: the jobs that it has had since then are missing.
    recording.add({"w1": answer(missed=1), "w2": answer(after=5, age_s=2.0)}, 4.0)
    assert (recording.missed, recording.gaps) == (9, [])


def test_an_unknown_number_of_jobs_is_told_in_words(recording: Recording) -> None:
    recording.add({"w1": answer(recorder="other"), "late": answer(after=5)}, 3.0)
    recording.add({"w1": answer(recorder="other")}, 4.0)
    recording.close()
    assert recording.gaps == [
        "w1 was restarted; its last jobs before that may be missing",
        "late answered only after 3 s; its jobs until then are missing",
        "late no longer answers; its last jobs may be missing",
    ]


def test_a_worker_that_had_no_job_before_it_answered_misses_none(recording: Recording) -> None:
    recording.add({"w1": answer(), "late": answer(after=0)}, 3.0)
    recording.close()
    assert (recording.missed, recording.gaps) == (0, [])


def test_workers_that_cannot_be_recorded_say_why(recording: Recording) -> None:
    recording.add({"old": {"error": "KeyError('batchery_record')"}, "odd": {"ok": "?"}}, 1.0)
    assert recording.refusals == {
        "old": "KeyError('batchery_record')",
        "odd": "answers with something else",
    }
    assert recording.workers.keys() == {"w1"}


def cost(pass_ms: float, item_us: float, batches: int) -> dict[str, Any]:
    return {"pass_ms": pass_ms, "item_us": item_us, "batches": batches, "error": 0.1}


def test_the_command_has_the_costs_of_all_workers(recording: Recording) -> None:
    rows = job("a", task="embed"), job("b", task="a name"), job("c", task="unknown")
    one = {"embed": cost(10.0, 500.0, 100), "never sent": cost(1.0, 1.0, 1)}
    two = {"embed": cost(20.0, 1000.0, 300), "a name": cost(3.0, 0.0, 5)}
    recording.add(
        {
            "w1": answer(*rows, costs=one, max_batch_sizes=dict.fromkeys(("embed", "a name"), 8)),
            "w2": answer(costs=two, max_batch_sizes={"unknown": 64}, devices=3),
        },
        1.0,
    )
    assert recording.costs == {"embed": (17.5, 0.875), "a name": (3.0, 0.0)}
    assert recording.max_batch_sizes == {"a name": 8, "embed": 8, "unknown": 64}
    assert recording.simulate_command("my trace") == (
        "batchery simulate --trace 'my trace' --devices 5 --max-batch-size 64"
        " --cost 'a name' 3 0 --cost embed 17.5 0.875"
    )


def test_devices_of_workers_that_are_gone_do_not_count(recording: Recording) -> None:
    recording.add({"w1": answer(), "w2": answer(devices=3)}, 0.0)
    assert recording.devices == 5
    recording.add({"w2": answer(devices=3)}, 1.0)
    assert recording.devices == 3
    # Where all are gone, they are what the jobs had.
    recording.add({}, 2.0)
    assert recording.devices == 5
