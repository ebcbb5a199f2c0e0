"""Step models in real workers: jobs join and leave while others run, each with its own end."""

from pathlib import Path
from typing import Any

import pytest

from apps import slots
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    slots.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.slots", "-c", "1")


def begin(item: Any = 1, **keywords: Any) -> Any:
    return slots.countdown.apply_async((item,), keywords)


@pytest.mark.usefixtures("worker")
def test_short_job_overtakes_a_long_one(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    long = begin(3, gate=str(gate))
    short = begin(2)
    assert short.get(timeout=TIMEOUT_S)["most"] >= 2
    assert not long.ready()
    gate.touch()
    long.get(timeout=TIMEOUT_S)


@pytest.mark.usefixtures("worker")
def test_many_jobs_join_and_leave_in_few_slots() -> None:
    jobs = [begin(number % 7 + 1) for number in range(100)]
    answers = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert len({answer["pid"] for answer in answers}) == 1
    assert max(answer["most"] for answer in answers) == 4


@pytest.mark.usefixtures("worker")
def test_a_higher_class_takes_a_slot_whose_job_goes_on_where_it_was(tmp_path: Path) -> None:
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    low = {"priority": 9}
    bulk = [
        slots.countdown.apply_async((50,), {"gate": str(gate), "notes": str(notes)}, **low)
        for _ in range(6)
    ]
    wait_for(lambda: len(slots.noted(notes)) == 4, "all slots are taken")
    live = [begin(3) for _ in range(2)]
    assert all(job.get(timeout=TIMEOUT_S)["most"] == 4 for job in live)
    assert not any(job.ready() for job in bulk)
    gate.touch()
    for job in bulk:
        job.get(timeout=TIMEOUT_S)


@pytest.mark.usefixtures("worker")
def test_what_was_put_aside_computes_nothing_again(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    bulk = [
        slots.countdown.apply_async((200,), {"notes": str(notes)}, priority=9) for _ in range(4)
    ]
    wait_for(lambda: len(slots.noted(notes)) == 4, "all slots are taken")
    begin(1).get(timeout=TIMEOUT_S)
    for job in bulk:
        job.get(timeout=TIMEOUT_S)
    assert [int(left) < 200 for left, *_ in slots.noted(notes)] == [False] * 4 + [True]
