"""The judge of the fault harness: what it calls lost, stuck, wrong, doubled and grown."""

import json
from dataclasses import replace
from typing import Any

from benchmarks.chaos.answers import Answer, Answers
from benchmarks.chaos.flatness import Sample, compare
from benchmarks.chaos.ledger import Execution, Receipt
from benchmarks.chaos.outbox import Submission
from benchmarks.chaos.recovery import Loss, recoveries
from benchmarks.chaos.verdict import Verdict
from benchmarks.chaos.workload import Kind, Order


def stored(result: Any, status: str = "SUCCESS", date: str = "today") -> bytes:
    return json.dumps({"status": status, "result": result, "date_done": date}).encode()


def test_a_result_is_doubled_when_it_is_stored_again_differently() -> None:
    answers = Answers()
    assert not answers.saw("a", stored(None, "STARTED"), 1.0)
    assert answers.saw("a", stored(1), 2.0)
    assert not answers.saw("a", stored(1), 3.0)  # Read, and announced as well.
    assert not answers.saw("a", stored(None, "STARTED"), 4.0)  # An announcement that was late.
    assert answers.changed == {}
    answers.saw("a", stored(1, date="tomorrow"), 5.0)
    assert set(answers.changed) == {"a"}
    assert answers.first["a"].at_s == 2.0
    answers.saw("b", b"no json", 6.0)
    answers.saw("b", stored(1), 7.0)
    assert set(answers.changed) == {"a"}
    assert answers.first["b"].state == "UNREADABLE"


def submission(number: int, kind: Kind = Kind.PLAIN, callbacks: str = "") -> Submission:
    ids = (*callbacks.split(), f"job{number}")
    return Submission(Order(number, kind), ids, frozenset(callbacks.split()))


def verdict() -> Verdict:
    return Verdict("stock", 0, 1.0, {})


def test_a_verdict_tells_lost_stuck_and_wrong_apart() -> None:
    some = [submission(number) for number in range(5)]
    answers = Answers()
    answers.saw("job0", stored(Order(0, Kind.PLAIN).expected), 1)
    answers.saw("job1", stored("something else"), 1)
    answers.saw("job2", stored(Order(2, Kind.PLAIN).expected, "FAILURE"), 1)
    judged = verdict()
    judged.judge(some, answers, lambda task_id: task_id == "job3")
    counts = (judged.submitted, judged.answered, judged.wrong, judged.stuck, judged.lost)
    assert counts == (5, 3, 2, 1, 1)
    assert not judged.is_good
    assert "lost: plain job4" in judged.text
    assert judged.info["stuck"] == 1


def test_a_good_run_may_execute_twice_but_not_send_or_answer_twice() -> None:
    chain = submission(1, Kind.CHAIN, "second")
    again = [Receipt(1, 1.0, "second", "tag"), Receipt(2, 2.0, "second", "tag")]
    twice = [Execution(1, 1.0, 1, 3), Execution(2, 2.0, 1, 3)]
    judged = verdict()
    judged.count([chain], again, twice)
    assert (judged.executions, judged.repeated) == (2, 1)
    assert judged.is_good
    judged.count([chain], [*again, Receipt(2, 3.0, "second", "another")], twice)
    assert judged.doubled_callbacks == 1
    assert not judged.is_good


def test_a_recovery_ends_when_the_last_job_of_a_lost_worker_is_elsewhere() -> None:
    history = [
        Receipt(1, 1.0, "done", "t1"),
        Receipt(1, 1.0, "moved", "t2"),
        Receipt(1, 1.0, "answered", "t3"),
        Receipt(1, 1.0, "never", "t4"),
        Receipt(2, 1.0, "other", "t5"),
        Receipt(2, 8.0, "moved", "t2"),
    ]
    answers = {
        "done": Answer(2.0, b"", "SUCCESS", None),
        "moved": Answer(20.0, b"", "SUCCESS", None),
        "answered": Answer(5.0, b"", "SUCCESS", None),
    }
    loss = Loss(1, 3.0, "kill worker", others=1)
    (found,) = recoveries([loss], history, answers, [3.0])
    assert (found.jobs, found.seconds, found.is_calm) == (2, 5.0, True)
    (found,) = recoveries([loss], history, answers, [3.0, 4.0])
    assert not found.is_calm
    (found,) = recoveries([replace(loss, others=0)], history, answers, [3.0])
    assert not found.is_calm
    judged = verdict()
    judged.follow([found])
    assert (judged.longest_recovery_s, judged.longest_troubled_recovery_s) == (0, 5.0)


def samples(**figures: list[float]) -> list[Sample]:
    rows = zip(*figures.values(), strict=True)
    return [Sample(float(at), dict(zip(figures, row, strict=True))) for at, row in enumerate(rows)]


def test_what_grows_is_told_from_what_scatters_and_from_a_warm_up() -> None:
    megabyte = float(1 << 20)
    some = samples(
        **{
            "elder: resident bytes": [50 * megabyte + n * megabyte for n in range(16)],
            "device: resident bytes": [n * megabyte for n in (1, 9, 50, 60)] + [80 * megabyte] * 12,
            "results keys": [1000.0 + 60 * (n % 2) for n in range(16)],
            "bindings members": [float(n) * 3 for n in range(16)],
            "queue members": [float(n) * 3 for n in range(16)],
        }
    )
    found = compare(some, lambda figure: figure != "queue members")
    assert [each.figure for each in found if not each.is_flat] == [
        "bindings members",
        "elder: resident bytes",
    ]
    growth = next(each for each in found if each.figure == "bindings members")
    assert (growth.early, growth.late) == (16.5, 40.5)
    judged = verdict()
    judged.growth, judged.samples = found, some
    assert not judged.is_good
    assert "grown: bindings members: 16.5 to 40.5" in judged.text
    assert judged.info["samples"]["at_s"] == [each.at_s for each in some]
    assert compare(some[:7], bool) == []
