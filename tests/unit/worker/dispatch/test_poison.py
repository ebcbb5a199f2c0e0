"""Poison detection: which jobs are quarantined, and which become dead letters."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded

from batchery.errors import DeviceDied
from batchery.transport.leases import Deaths
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.dispatch import poison
from batchery_worker.dispatch.poison import MAX_DEATHS, PoisonDetector, note_begin, note_end
from batchery_worker.in_flight import DispatchedBatch, TaskCall
from batchery_worker.job import Batch, BatchKey, Job, Limits
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore

HOW = "device process for cpu died: exit code 1"


class Recorder:
    """The settlement and the jobs in flight, as far as the detector uses them."""

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.in_flight: list[str] = []

    def left_by(self, dispatched: DispatchedBatch) -> list[Job[TaskCall]]:
        return list(dispatched.batch.jobs)

    def wants(self, _: TaskCall) -> bool:
        return True

    def fail(self, call: TaskCall, error: Exception) -> None:
        self.failures[call.task_id] = error

    def add(self, call: TaskCall, pid: int) -> None:
        self.in_flight.append(call.task_id)


class Scene:
    """A detector with a real scheduler, and a lease store without Redis."""

    recorder: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scheduler: Scheduler[TaskCall] = Scheduler()
        self.recorder = Recorder()
        self.detector = PoisonDetector(self.scheduler, self.recorder, self.recorder)
        self.store: Any = FakeLeaseStore()
        self.dead_letters: list[str] = []
        monkeypatch.setattr(
            poison, "dead_letter_on_ack", lambda message, _: self.dead_letters.append(message)
        )

    def job(self, task_id: str = "j", *, deaths: int = 0, is_leased: bool = True) -> Job[TaskCall]:
        lease = LeaseHandle(self.store, task_id) if is_leased else None
        request: Any = SimpleNamespace(lease=lease, message=f"message of {task_id}")
        nothing: Any = None
        call = TaskCall(nothing, ("task", task_id, {}), nothing, nothing, nothing, request)
        return Job(task_id, BatchKey("task"), Limits(8), 1, 0.0, call, deaths=deaths)

    def next_batch(self) -> Batch[TaskCall] | None:
        return self.scheduler.next_batch(0, alone=False, now_s=1.0)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def dispatched(*jobs: Job[TaskCall], alone: bool) -> DispatchedBatch:
    return DispatchedBatch(Batch(jobs, alone=alone), dispatched_s=0.0)


@pytest.mark.parametrize("is_leased", [True, False])
def test_job_that_is_no_suspect_shares_a_batch(scene: Scene, is_leased: bool) -> None:
    for task_id in ("a", "b"):
        scene.detector.admit(scene.job(task_id, is_leased=is_leased))
    batch = scene.next_batch()
    assert batch is not None
    assert (len(batch.jobs), batch.alone) == (2, False)


def test_job_recovered_from_a_dead_worker_runs_alone(scene: Scene) -> None:
    scene.store.died["a"] = Deaths(0)
    for task_id in ("a", "b"):
        scene.detector.admit(scene.job(task_id))
    batch = scene.next_batch()
    assert batch is not None
    assert batch.alone
    assert [(job.id, job.recovered) for job in batch.jobs] == [("a", True)]


def test_jobs_of_one_dead_worker_run_in_halves_with_nothing_next_to_them(scene: Scene) -> None:
    jobs = [scene.job(task_id) for task_id in "abcd"]
    for job in jobs:
        scene.store.died[job.id] = Deaths(0, group_size=4)
        scene.detector.admit(job)
    for half in ("ab", "cd"):
        batch = scene.next_batch()
        assert batch is not None
        assert [(job.id, job.deaths) for job in batch.jobs] == [(each, 0) for each in half]
        assert not batch.alone
        assert DispatchedBatch(batch, dispatched_s=0.0).is_reserved


def test_deaths_of_earlier_workers_are_kept_with_the_job(scene: Scene) -> None:
    scene.store.died["a"] = Deaths(MAX_DEATHS - 1)
    scene.detector.admit(scene.job("a"))
    batch = scene.next_batch()
    assert batch is not None
    assert batch.jobs[0].deaths == MAX_DEATHS - 1
    assert scene.dead_letters == []


def test_job_that_killed_too_many_workers_becomes_a_dead_letter(scene: Scene) -> None:
    scene.store.died["a"] = Deaths(MAX_DEATHS)
    scene.detector.admit(scene.job("a"))
    assert scene.next_batch() is None
    assert scene.dead_letters == ["message of a"]
    assert scene.recorder.in_flight == ["a"]
    assert isinstance(scene.recorder.failures["a"], DeviceDied)
    assert "its worker died" in str(scene.recorder.failures["a"])


def test_death_of_a_shared_batch_is_blamed_on_nobody(scene: Scene) -> None:
    jobs = [scene.job("a"), scene.job("b")]
    scene.detector.on_death(dispatched(*jobs, alone=False), HOW)
    for expected in jobs:
        batch = scene.next_batch()
        assert batch is not None
        assert (batch.jobs, batch.alone) == ((expected,), True)


def test_first_death_alone_gives_the_job_another_try(scene: Scene) -> None:
    job = scene.job("a")
    scene.detector.on_death(dispatched(job, alone=True), HOW)
    batch = scene.next_batch()
    assert batch is not None
    assert (batch.jobs, batch.alone) == ((replace(job, deaths=1),), True)
    assert scene.recorder.failures == {}


def test_last_death_alone_makes_a_dead_letter_and_says_why(scene: Scene) -> None:
    job = scene.job("a", deaths=MAX_DEATHS - 1)
    scene.detector.on_death(dispatched(job, alone=True), HOW)
    assert scene.next_batch() is None
    assert scene.dead_letters == ["message of a"]
    assert HOW in str(scene.recorder.failures["a"])


def test_poison_job_without_a_lease_only_fails(scene: Scene) -> None:
    job = scene.job("a", deaths=MAX_DEATHS - 1, is_leased=False)
    scene.detector.on_death(dispatched(job, alone=True), HOW)
    assert scene.dead_letters == []
    assert isinstance(scene.recorder.failures["a"], DeviceDied)


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "alone on its device"])
def test_only_job_of_a_batch_that_reached_its_hard_limit_fails_at_once(
    scene: Scene, alone: bool
) -> None:
    job = scene.job("a")
    batch = dispatched(job, alone=alone)
    batch.expired, batch.hard_limit_s = True, 3.0
    scene.detector.on_death(batch, HOW)
    assert isinstance(scene.recorder.failures["a"], TimeLimitExceeded)
    assert scene.next_batch() is None
    assert scene.dead_letters == []


def test_jobs_of_a_batch_that_reached_its_hard_limit_run_one_by_one(scene: Scene) -> None:
    batch = dispatched(scene.job("a"), scene.job("b"), alone=False)
    batch.expired, batch.hard_limit_s = True, 3.0
    scene.detector.on_death(batch, HOW)
    assert scene.recorder.failures == {}
    first = scene.next_batch()
    assert first is not None
    assert (first.alone, len(first.jobs)) == (True, 1)


def test_note_has_the_leased_jobs_of_one_store(scene: Scene) -> None:
    noted: list[Any] = []
    scene.store.began = lambda jobs, *, alone, **_: noted.append((jobs, alone))
    other = replace(scene.job("b"), payload=Scene(pytest.MonkeyPatch()).job("b").payload)
    note_begin([scene.job("a"), other, scene.job("c", is_leased=False)], alone=False)
    assert noted == [({"a": "a"}, False)]


def test_batch_that_is_back_is_reported_to_the_store_that_has_its_note(scene: Scene) -> None:
    ended: list[int] = []
    scene.store.ended = ended.append
    batch = dispatched(scene.job(), alone=False)
    # Without leases nothing was noted.
    note_end(batch)
    assert ended == []
    batch.note = note_begin([scene.job()], alone=False)
    note_end(batch)
    assert ended == [1]


def test_log_says_how_many_jobs_are_tested_one_by_one_where_nobody_is_blamed_yet(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.detector.on_death(dispatched(scene.job("a"), alone=True), HOW)
    assert caplog.text == ""
    scene.detector.on_death(dispatched(scene.job("a"), scene.job("b"), alone=False), HOW)
    assert "2 jobs of task run one by one" in caplog.text


def test_batch_without_leases_is_not_noted(scene: Scene) -> None:
    assert note_begin([scene.job(is_leased=False)], alone=True) is None


@pytest.mark.parametrize(
    ("alone", "recovered", "expected"),
    [(True, True, True), (True, False, False), (False, True, True)],
)
def test_recovered_suspect_reserves_all_devices(
    scene: Scene, alone: bool, recovered: bool, expected: bool
) -> None:
    job = replace(scene.job(), recovered=recovered)
    assert dispatched(job, alone=alone).is_reserved is expected
