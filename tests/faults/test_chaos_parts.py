"""The parts of the fault harness that need no processes."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.chaos.answers import Answers
from benchmarks.chaos.families import Families
from benchmarks.chaos.ledger import Execution, Receipt
from benchmarks.chaos.outbox import Submission
from benchmarks.chaos.verdict import Verdict
from benchmarks.chaos.workload import Kind, Order


def stored(result: Any, status: str = "SUCCESS", date: str = "today") -> bytes:
    return json.dumps({"status": status, "result": result, "date_done": date}).encode()


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


def test_each_family_of_keys_has_its_bound_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "leases.md").read_text(encoding="utf-8")
    table = page.partition("## What Redis holds")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and row[2].strip(" |") for row in rows)
    named = [pattern for row in rows for pattern in re.findall("`(.+?)`", row[0])]
    assert sorted(named) == sorted(Families("QUEUE").patterns)
