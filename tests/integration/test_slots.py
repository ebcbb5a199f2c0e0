"""Step models in real workers: jobs join and leave while others run, each with its own end."""

from pathlib import Path
from typing import Any

import pytest

from apps import slots
from conftest import StartWorker
from support.harness import Worker
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
