"""Step models in real workers: jobs join and leave while others run, each with its own end."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from apps import slots
from batchery import AsyncClient, DeadlineExceeded, InvalidItem
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S, patient

#: How long its device may give no sign: each step is one.
MAX_PASS_S = patient(2.5)

#: Deadlines and expiry count from the sending: by then the job must have joined.
SOON_S = patient(2.0)


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    """It has nothing to serve but the step model."""
    slots.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    env = {"BATCHERY_SHED_LATE": "true", "BATCHERY_MAX_PASS_S": str(MAX_PASS_S)}
    # Nobody dies here: one that stands still for a while keeps its jobs.
    env["LEASE_EXPIRY_S"] = str(patient(30))
    return start_module_worker("apps.slots", "-c", "1", "-Q", "countdown", env=env)


def begin(item: Any = 1, options: Any = None, **keywords: Any) -> Any:
    return slots.countdown.apply_async((item,), keywords, **(options or {}))


def devices(worker: Worker) -> Any:
    return worker.inspect(slots.app, "stats")["pool"]["devices"]


def device(worker: Worker) -> dict[str, Any]:
    found: dict[str, Any] = devices(worker)["cpu/countdown"]
    return found


@pytest.fixture
def gated(worker: Worker, tmp_path: Path) -> Iterator[Any]:
    """A job that runs for as long as the test does, and then succeeds."""
    gate = tmp_path / "gate"
    job = begin(3, gate=str(gate), notes=str(tmp_path / "gated"))
    wait_for(lambda: slots.noted(tmp_path / "gated"), "it has joined")
    yield job
    assert not job.ready()
    gate.touch()
    assert job.get(timeout=TIMEOUT_S)["pid"] == device(worker)["pid"]


@pytest.mark.usefixtures("gated")
def test_short_job_overtakes_a_long_one() -> None:
    assert begin(2).get(timeout=TIMEOUT_S)["most"] >= 2


def test_many_jobs_join_and_leave_in_few_slots(worker: Worker) -> None:
    jobs = [begin(number % 7 + 1) for number in range(100)]
    answers = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert {answer["pid"] for answer in answers} == {device(worker)["pid"]}
    assert max(answer["most"] for answer in answers) == slots.Countdown.slots

    def model() -> dict[str, Any]:
        found: dict[str, Any] = device(worker)["models"]["countdown"]
        return found

    # A caller has its result before the worker hears of it.
    wait_for(lambda: model()["slots_taken"] == 0, "all have left")
    assert model()["slots"] == 4
    assert model()["steps"] >= 90
    assert len(worker.devices()) == 1


@pytest.mark.usefixtures("gated")
def test_job_that_cannot_join_or_is_unfit_fails_alone() -> None:
    with pytest.raises(ValueError, match="no such voice"):
        begin(fail="no such voice").get(timeout=TIMEOUT_S)
    with pytest.raises(InvalidItem, match="not a number"):
        begin("three").get(timeout=TIMEOUT_S)


def soft_limit() -> dict[str, Any]:
    return {"soft_time_limit": 0.5}


def hard_limit() -> dict[str, Any]:
    return {"time_limit": 0.5}


def deadline() -> dict[str, Any]:
    return {"deadline_s": SOON_S}


def expiry() -> dict[str, Any]:
    return {"expires": datetime.now(UTC) + timedelta(seconds=SOON_S)}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (soft_limit, SoftTimeLimitExceeded),
        (hard_limit, TimeLimitExceeded),
        (deadline, DeadlineExceeded),
        (expiry, TaskRevokedError),
    ],
)
def test_job_whose_time_is_over_leaves_its_slot_and_touches_no_neighbour(
    worker: Worker,
    gated: Any,
    tmp_path: Path,
    options: Callable[[], dict[str, Any]],
    error: type[Exception],
) -> None:
    job = begin(3, options(), gate=str(tmp_path / "never"), notes=str(tmp_path / "notes"))
    with pytest.raises(error):
        job.get(timeout=TIMEOUT_S)
    assert slots.noted(tmp_path / "notes")
    assert device(worker)["models"]["countdown"]["slots_taken"] == 1
    assert not gated.ready()


@pytest.mark.usefixtures("worker")
def test_time_limit_of_a_stream_is_that_of_each_piece(redis_url: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def scene() -> tuple[list[Any], Any]:
        async with AsyncClient(redis_url) as client:
            pieces = client.task("countdown").stream(3, timeout_s=SOON_S, gate=str(gate))
            end_s = time.monotonic() + 2 * SOON_S
            while time.monotonic() < end_s:
                assert await anext(pieces) == "waits"
            gate.touch()
            rest = [piece async for piece in pieces if piece != "waits"]
            return rest, pieces.result

    rest, result = asyncio.run(scene())
    assert rest == [2, 1]
    assert result["pid"]


def test_job_that_is_terminated_leaves_its_slot_and_touches_no_neighbour(
    worker: Worker, gated: Any, tmp_path: Path
) -> None:
    job = begin(3, gate=str(tmp_path / "never"), notes=str(tmp_path / "notes"))
    wait_for(lambda: slots.noted(tmp_path / "notes"), "it has joined")
    slots.app.control.revoke(job.id, terminate=True, reply=True, timeout=TIMEOUT_S, limit=1)
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT_S)
    wait_for(lambda: device(worker)["batches_in_flight"] == 1, "its slot is free")
    # The device says how many are taken when it answers a job.
    begin().get(timeout=TIMEOUT_S)
    wait_for(
        lambda: device(worker)["models"]["countdown"]["slots_taken"] == 1, "the worker has heard it"
    )
    assert not gated.ready()


@pytest.mark.usefixtures("gated")
def test_items_of_one_job_have_slots_of_their_own_and_free_each_when_it_ends(
    tmp_path: Path,
) -> None:
    header = {"batchery": {"v": 1, "n": 12}}
    gate, notes = tmp_path / "items", tmp_path / "notes"
    items = [*range(1, 11), "odd", 1]
    job = slots.countdown.apply_async((items,), {"notes": str(notes)}, headers=header)
    entries = job.get(timeout=TIMEOUT_S)
    assert [list(entry) for entry in entries] == [["ok"]] * 10 + [["error"], ["ok"]]
    assert entries[10]["error"]["type"] == "InvalidItem"
    # Besides the job that is there: never more than there are slots.
    assert {int(count) for _, count, _ in slots.noted(notes)} <= {2, 3, 4}
    held = slots.countdown.apply_async(
        ([1, 2, 3],), {"gate": str(gate)}, headers={"batchery": {"v": 1, "n": 3}}
    )
    other = begin(1)
    gate.touch()
    assert [list(entry) for entry in held.get(timeout=TIMEOUT_S)] == [["ok"]] * 3
    other.get(timeout=TIMEOUT_S)


@pytest.mark.usefixtures("worker")
def test_job_of_another_task_is_refused_where_only_slots_are() -> None:
    job = slots.upper.apply_async(("text",), queue="countdown")
    with pytest.raises(InvalidItem, match="serves only models with slots"):
        job.get(timeout=TIMEOUT_S)


def test_a_job_may_take_longer_than_its_device_may_be_silent(worker: Worker) -> None:
    before = device(worker)["pid"]
    job = begin(round(2 * MAX_PASS_S / slots.STEP_S))
    assert job.get(timeout=TIMEOUT_S)["pid"] == before == device(worker)["pid"]
    assert "hangs" not in worker.log
