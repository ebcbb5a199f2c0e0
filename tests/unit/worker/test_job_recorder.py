"""What a worker keeps of its jobs for those who ask, and what it says that they missed."""

import math
from typing import Any

import pytest

from batchery.protocol.figures import RecordedJob
from batchery_worker import job_recorder
from batchery_worker.job import BatchKey, Job, Lane, Limits
from batchery_worker.job_recorder import LEASE_S, JobRecorder
from support.patience import patient

#: Unix seconds, while the scheduler's clock stands at 0.
START_S = patient(1_790_000_000.0)


class Clerk:
    """A recorder, its clocks, and the place of one caller."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.recorder = JobRecorder(0.0, lambda: START_S + self.now_s)

    def admit(self, *names: str, lane: Lane | None = None, **headers: Any) -> None:
        """Admits a job for each name of a task; `deadline_s` counts from now."""
        due_s = self.now_s + headers.pop("deadline_s", math.inf)
        for name in names:
            job: Any = Job(
                "id", BatchKey(name), Limits(8), 2, self.now_s, None, lane or Lane(), due_s
            )
            self.recorder.note(job, headers)


class Caller:
    def __init__(self, clerk: Clerk) -> None:
        self.clerk = clerk
        self.place: tuple[str | None, int] = (None, 0)

    def ask(self, clerk: Clerk | None = None) -> dict[str, Any]:
        clerk = clerk or self.clerk
        answer = clerk.recorder.poll(*self.place, clerk.now_s)
        self.place = answer["recorder"], answer["after"]
        answer["tasks"] = [row.task for row in answer["rows"]]
        return answer


@pytest.fixture
def clerk() -> Clerk:
    return Clerk()


@pytest.fixture
def caller(clerk: Clerk) -> Caller:
    return Caller(clerk)


def test_a_row_says_all_that_a_trace_has(clerk: Clerk, caller: Caller) -> None:
    caller.ask()
    clerk.now_s = 5.0
    sent = {"batchery_sent_at": START_S + 3.25}
    clerk.admit("embed", lane=Lane("low", "acme"), deadline_s=1.0, **sent)
    clerk.admit("embed")
    answer = caller.ask()
    first, second = answer["rows"]
    # It had a second left when it came, and was under way for 1.75.
    assert first == RecordedJob(
        START_S + 3.25, "embed", "low", "acme", 2, 2.75, f"id {START_S + 3.25}"
    )
    assert (second.time_s, second.deadline_s) == (START_S + 5.0, None)
    assert answer["max_batch_sizes"] == {"embed": 8}


def test_a_deadline_that_is_over_is_not_before_the_job(clerk: Clerk, caller: Caller) -> None:
    caller.ask()
    clerk.admit("late", deadline_s=-2.0)
    assert caller.ask()["rows"][0].deadline_s == 0.0


def test_a_job_with_an_eta_counts_from_when_it_is_wanted(clerk: Clerk, caller: Caller) -> None:
    caller.ask()
    clerk.now_s = 4.0
    clerk.admit("a", eta="2026-09-21T14:13:20+00:00", batchery_sent_at=START_S - 60)
    assert caller.ask()["rows"][0].time_s == START_S + 4.0


@pytest.mark.parametrize("value", ["soon", math.nan, 0, [1]])
def test_a_malformed_time_of_sending_is_the_time_of_arrival(
    clerk: Clerk, caller: Caller, value: Any
) -> None:
    caller.ask()
    clerk.admit("a", batchery_sent_at=value)
    assert caller.ask()["rows"][0].time_s == START_S


def test_nothing_is_kept_while_nobody_asks(clerk: Clerk, caller: Caller) -> None:
    clerk.admit("before")
    first = caller.ask()
    assert (first["rows"], first["missed"], first["after"]) == ([], 0, 1)
    clerk.admit("a", "b")
    assert caller.ask()["tasks"] == ["a", "b"]
    assert caller.ask()["tasks"] == []


def test_recording_ends_after_a_while_and_says_what_was_missed(
    clerk: Clerk, caller: Caller
) -> None:
    caller.ask()
    clerk.now_s = LEASE_S - 0.001
    clerk.admit("in time")
    clerk.now_s = LEASE_S
    clerk.admit("too late")
    clerk.admit("even later")
    answer = caller.ask()
    # What was in time was let go with the rest.
    assert (answer["tasks"], answer["missed"]) == ([], 3)
    clerk.admit("again")
    answer = caller.ask()
    assert (answer["tasks"], answer["missed"]) == (["again"], 0)


def test_each_question_prolongs_the_recording(clerk: Clerk, caller: Caller) -> None:
    for _ in range(5):
        caller.ask()
        clerk.now_s += LEASE_S - 1.0
        clerk.admit("a")
    assert caller.ask()["tasks"] == ["a"]


def test_the_oldest_jobs_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_recorder, "MAX_ROWS", 3)
    clerk = Clerk()
    caller = Caller(clerk)
    caller.ask()
    clerk.admit(*"abcde")
    answer = caller.ask()
    assert (answer["tasks"], answer["missed"], answer["left"]) == (["c", "d", "e"], 2, 0)


def test_a_long_answer_comes_in_parts(
    clerk: Clerk, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_recorder, "MAX_ANSWER_ROWS", 2)
    caller.ask()
    clerk.admit(*"abcde")
    answers = [caller.ask() for _ in range(3)]
    assert [each["tasks"] for each in answers] == [["a", "b"], ["c", "d"], ["e"]]
    assert [each["left"] for each in answers] == [3, 1, 0]
    assert {each["missed"] for each in answers} == {0}


def test_several_callers_take_nothing_from_each_other(clerk: Clerk, caller: Caller) -> None:
    other = Caller(clerk)
    caller.ask()
    clerk.admit("a")
    other.ask()
    clerk.admit("b")
    assert caller.ask()["tasks"] == ["a", "b"]
    assert other.ask()["tasks"] == ["b"]
    clerk.admit("c")
    assert other.ask()["tasks"] == caller.ask()["tasks"] == ["c"]


def test_all_jobs_of_a_restarted_worker_are_new_to_a_caller(caller: Caller) -> None:
    caller.clerk.admit(*"abc")
    caller.ask()
    restarted = Clerk()
    restarted.admit("x")
    restarted.now_s = 2.5
    answer = caller.ask(restarted)
    assert (answer["tasks"], answer["missed"], answer["age_s"]) == ([], 1, 2.5)
    restarted.admit("y")
    assert caller.ask(restarted)["tasks"] == ["y"]


def test_the_same_message_has_the_same_name_each_time(clerk: Clerk, caller: Caller) -> None:
    caller.ask()
    clerk.admit("a", batchery_sent_at=START_S - 2)
    clerk.now_s = 3.0
    clerk.admit("a", batchery_sent_at=START_S - 2)
    clerk.admit("a", batchery_sent_at=START_S + 1)
    first, again, retried = (row.message for row in caller.ask()["rows"])
    assert first == again != retried
