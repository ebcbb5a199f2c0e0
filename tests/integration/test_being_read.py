"""Jobs whose items are read first: they keep no other out, and nothing of a job is lost."""

import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import read_first
from batchery import DeadlineExceeded, DeviceDied
from conftest import StartWorker, flush
from support.harness import leased, wait_for
from support.own_process import run_alone
from support.patience import TIMEOUT_S, patient


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    read_first.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def send(item: Any, **options: Any) -> Any:
    return read_first.repeat.apply_async((item,), **options)


def test_a_job_that_is_being_read_keeps_no_other_out(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    worker = start_worker("apps.read_first")
    gate = tmp_path / "gate"
    held = send(str(gate))
    others = [send(f"text {number}") for number in range(40)]
    assert [job.get(timeout=TIMEOUT_S) for job in others] == [
        f"read text {number}" for number in range(40)
    ]
    # Celery's commands see it, and so do figures.
    assert [each["id"] for each in worker.inspect(client, "reserved")] == [held.id]
    (device,) = worker.inspect(client, "stats")["pool"]["devices"].values()
    assert device["batches_in_flight"] == 0
    gate.touch()
    assert held.get(timeout=TIMEOUT_S) == "read gate"


def test_a_job_with_several_items_waits_for_all_of_them(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker("apps.read_first")
    gate = tmp_path / "gate"
    # More than are read ahead.
    texts = [str(gate), *(f"text {number}" for number in range(99))]
    jobs = read_first.repeat.submit_many(texts)
    gate.touch()
    assert jobs.get(timeout=TIMEOUT_S) == [
        "read gate",
        *(f"read text {number}" for number in range(99)),
    ]


def test_a_job_misses_its_deadline_while_it_is_being_read(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker("apps.read_first", env={"BATCHERY_SHED_LATE": "true"})
    assert send("first").get(timeout=TIMEOUT_S) == "read first"
    headers = {"batchery_deadline": time.time() + 1}
    late = send(str(tmp_path / "never"), headers=headers)
    with pytest.raises(DeadlineExceeded):
        late.get(timeout=TIMEOUT_S)
    assert send("next").get(timeout=TIMEOUT_S) == "read next"


@pytest.mark.timeout(300)
def test_suspects_of_a_death_are_read_again_and_the_culprit_fails_alone(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker("apps.read_first")
    texts = ["a", "b", "die", "c", "d"]
    outcomes = [job.get(timeout=patient(200), propagate=False) for job in map(send, texts)]
    assert isinstance(outcomes.pop(2), DeviceDied)
    assert outcomes == ["read a", "read b", "read c", "read d"]
    wait_for(lambda: leased(redis_url) == 0, "no job is held any more")


#: Runs in a process of its own: a worker leaves its marks on the one that it was in.
TEST = f"""
import sys
from celery.contrib.testing.worker import start_worker
from apps.read_first import app, repeat

app.conf.update(broker_url=sys.argv[1], result_backend=sys.argv[1])
with start_worker(app, perform_ping_check=False, shutdown_timeout={TIMEOUT_S}):
    jobs = repeat.submit_many([f"text {{number}}" for number in range(50)])
    answers = jobs.get(timeout={TIMEOUT_S}, disable_sync_subtasks=False)
    assert answers == [f"read text {{number}}" for number in range(50)]
print("done")
"""


def test_jobs_that_were_handed_over_are_read_too(redis_url: str, tmp_path: Path) -> None:
    flush(redis_url)
    run_alone(TEST, redis_url, folder=tmp_path)
