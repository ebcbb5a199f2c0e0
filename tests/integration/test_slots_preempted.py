"""Slots that a higher class takes: the job that had one goes on later, where it was."""

from pathlib import Path

import pytest

from apps import slots
from conftest import StartWorker
from support.harness import wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module", autouse=True)
def worker(start_module_worker: StartWorker, redis_url: str) -> None:
    slots.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    start_module_worker("apps.slots", "-c", "1")


def test_a_higher_class_takes_a_slot_whose_job_goes_on_where_it_was(tmp_path: Path) -> None:
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    bulk = [
        slots.countdown.apply_async((50,), {"gate": str(gate), "notes": str(notes)}, priority=9)
        for _ in range(6)
    ]
    wait_for(lambda: len(slots.noted(notes)) == 4, "all slots are taken")
    live = [slots.countdown.delay(3) for _ in range(2)]
    assert all(job.get(timeout=TIMEOUT_S)["most"] == 4 for job in live)
    assert not any(job.ready() for job in bulk)
    gate.touch()
    for job in bulk:
        job.get(timeout=TIMEOUT_S)


def test_what_was_put_aside_computes_nothing_again(tmp_path: Path) -> None:
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    keywords = {"gate": str(gate), "hold_at": 100, "notes": str(notes)}
    bulk = [slots.countdown.apply_async((200,), keywords, priority=9) for _ in range(4)]
    wait_for(lambda: len(list(tmp_path.glob("gate.*"))) == 4, "all are held back half way")
    slots.countdown.delay(1).get(timeout=TIMEOUT_S)
    gate.touch()
    for job in bulk:
        job.get(timeout=TIMEOUT_S)
    assert [left for left, *_ in slots.noted(notes)] == ["200"] * 4 + ["100"]
