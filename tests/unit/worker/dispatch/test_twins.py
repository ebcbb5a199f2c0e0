"""A job whose twin is on another device waits for it; the scheduler and the pool, on fakes."""

from typing import Any

import pytest
from celery.worker import state as worker_state
from hypothesis import given
from hypothesis import strategies as st

from apps.batches import CACHED, FOUR
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.job import Batch, BatchKey, Job, Limits
from support.fake_worker import StartPool

KEYS = [BatchKey("shout"), BatchKey("shout", '{"tag":"x"}')]


def job(number: int, fold: str | None, key: BatchKey = KEYS[0]) -> Job[None]:
    name = None if fold is None else fold.encode()
    return Job(str(number), key, Limits(4), 1, float(number), None, fold=name)


def admitted(*jobs: Job[None]) -> Scheduler[None]:
    scheduler: Scheduler[None] = Scheduler()
    for each in jobs:
        scheduler.admit(each)
    return scheduler


def launch(scheduler: Scheduler[None], device: str, in_flight: int = 0) -> Batch[None] | None:
    batch = scheduler.next_batch(in_flight, False, 100.0, device=device)
    if batch is not None:
        scheduler.departed(batch.jobs, device)
    return batch


def ids(batch: Batch[Any] | None) -> list[str]:
    return [each.id for each in batch.jobs] if batch is not None else []


def test_a_twin_waits_while_the_other_is_on_another_device() -> None:
    scheduler = admitted(job(1, "a"), job(2, "b"))
    flying = launch(scheduler, "cuda:0")
    assert flying is not None
    for each in (job(3, "a"), job(4, "c"), job(5, None), job(6, "a")):
        scheduler.admit(each)
    assert ids(launch(scheduler, "cuda:1")) == ["4", "5"]
    assert len(scheduler) == 2
    assert [each.id for each in scheduler] == ["3", "6"]
    assert launch(scheduler, "cuda:2") is None
    scheduler.admit(job(7, "d"))
    scheduler.landed(flying.jobs)
    # They have waited longest.
    assert ids(launch(scheduler, "cuda:2")) == ["3", "6", "7"]


def test_a_twin_may_follow_to_the_same_device() -> None:
    scheduler = admitted(*(job(number, "a") for number in range(8)))
    assert ids(launch(scheduler, "cuda:0")) == ["0", "1", "2", "3"]
    assert ids(launch(scheduler, "cuda:0", in_flight=1)) == ["4", "5", "6", "7"]


def test_jobs_of_other_keys_are_no_twins() -> None:
    scheduler = admitted(job(1, "a"))
    launch(scheduler, "cuda:0")
    scheduler.admit(job(2, "a", KEYS[1]))
    assert ids(launch(scheduler, "cuda:1")) == ["2"]


def test_twins_that_wait_are_forgotten_with_all_others() -> None:
    scheduler = admitted(job(1, "a"))
    launch(scheduler, "cuda:0")
    scheduler.admit(job(2, "a"))
    assert launch(scheduler, "cuda:1") is None
    assert [each.id for each in scheduler.clear()] == ["2"]
    assert len(scheduler) == 0


def test_a_suspect_waits_for_nobody() -> None:
    scheduler = admitted(job(1, "a"))
    launch(scheduler, "cuda:0")
    scheduler.quarantine(job(2, "a"))
    batch = launch(scheduler, "cuda:1")
    assert ids(batch) == ["2"]
    scheduler.admit(job(3, "a"))
    assert launch(scheduler, "cuda:2") is None


@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from(KEYS)), max_size=30),
    st.lists(st.sampled_from(["launch 0", "launch 1", "land 0", "land 1", "admit"])),
)
def test_no_job_is_lost_and_no_twins_fly_on_two_devices(
    arrivals: list[tuple[str | None, BatchKey]], steps: list[str]
) -> None:
    scheduler: Scheduler[None] = Scheduler()
    coming = [job(number, fold, key) for number, (fold, key) in enumerate(arrivals)]
    flying: dict[str, list[Batch[None]]] = {"0": [], "1": []}
    #: On which device a fold was seen, until one of its jobs came back.
    seen: dict[tuple[BatchKey, bytes | None], str] = {}
    done: list[str] = []
    # In the end everything is admitted, launched and landed.
    closing = [*["admit"] * len(coming), *["launch 0", "land 0", "land 1"] * (len(coming) + 1)]
    for step in [*steps, *closing]:
        what, _, device = step.partition(" ")
        if what == "admit" and coming:
            scheduler.admit(coming.pop(0))
        elif what == "launch" and len(flying[device]) < 2:
            batch = launch(scheduler, device, len(flying[device]))
            for each in batch.jobs if batch is not None else ():
                assert each.fold is None or seen.setdefault((each.key, each.fold), device) == device
            flying[device] += [] if batch is None else [batch]
        elif what == "land" and flying[device]:
            batch = flying[device].pop(0)
            scheduler.landed(batch.jobs)
            done += ids(batch)
            for each in batch.jobs:
                seen.pop((each.key, each.fold), None)
    assert sorted(done, key=int) == [str(number) for number in range(len(arrivals))]
    assert len(scheduler) == 0


def test_the_pool_holds_a_twin_back_until_the_other_is_answered_for(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    worker.receive_each("same", task=CACHED)
    worker.loop.settle()
    worker.receive_each("same", "other", task=CACHED)
    assert (worker.works(first), worker.works(second)) == ([["same"]], [["other"]])
    assert worker.info()["waiting"] == 1
    second.answer()
    assert worker.works(second) == [["other"]]
    first.answer()
    worker.loop.settle()
    assert sorted(worker.works(first) + worker.works(second)) == [["other"], ["same"], ["same"]]


def test_the_twin_of_a_job_that_died_with_its_device_is_computed(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    worker.receive_each("same", task=CACHED)
    worker.loop.settle()
    (twin,) = worker.receive_each("same", task=CACHED)
    assert worker.works(second) == []
    first.die()
    worker.loop.settle()
    # The suspect alone, then the twin.
    second.hear()
    second.answer()
    worker.loop.sleep(60)
    worker.work_off()
    assert worker.result(twin.id) == "same"
    worker.settled(twin)


def test_the_twin_of_a_revoked_job_is_computed(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    revoked, twin = worker.receive_each("same", "same", task=CACHED)
    worker_state.revoked.add(revoked.id)
    assert worker.works(worker.devices.started[0]) == [["same"]]
    worker.work_off()
    assert worker.result(twin.id) == "same"
    worker.settled(revoked, twin)


@pytest.mark.parametrize("names", [("cpu",), ("cuda:0", "cuda:1")], ids=len)
def test_only_jobs_of_a_task_with_a_cache_are_compared_and_only_between_devices(
    start_pool: StartPool, names: tuple[str, ...]
) -> None:
    worker = start_pool(*names)
    worker.receive_each("same", task=CACHED)
    worker.receive_each("same")
    worker.loop.settle()
    dispatcher: Any = worker.pool._dispatcher
    flying = [job for device in dispatcher._supervisor for job in jobs_of(device)]
    folds = {job.key.task: job.fold for job in (*flying, *dispatcher._scheduler)}
    assert folds == {CACHED: b"ssame" if len(names) > 1 else None, FOUR: None}


def jobs_of(device: DeviceProcess) -> list[Job[Any]]:
    return [job for dispatched in device.batches.values() for job in dispatched.batch.jobs]
