"""Jobs in slots, between Celery and a fake device: how many, in which order, and their ends."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from apps.batches import FOUR, app
from batchery import BatchArgumentError, DeviceDied, StepModel, register
from batchery_worker.device_pool.supervisor import MAX_STEP_S
from batchery_worker.ipc.messages import Cancel, Done, Left, Ready, Work, load_message
from support.fake_devices import FakeDevice
from support.fake_worker import FakeWorker, StartPool, read_items

SLOTS = "apps.batches.slots"


@pytest.fixture(autouse=True)
def _task() -> Iterator[None]:
    register(app, SLOTS, StepModel, slots=4, time_limit=5)
    yield
    app.tasks.unregister(SLOTS)


@pytest.fixture
def worker(start_pool: StartPool) -> FakeWorker:
    return start_pool()


def slotted(worker: FakeWorker) -> FakeDevice:
    """The newest process with slots."""
    found = [each for each in worker.devices.started if each.hear() == [] or each.works]
    return next(each for each in reversed(found) if each.setups[0].task == SLOTS)


def running(worker: FakeWorker) -> list[object]:
    """The items that the newest process with slots was given, one job each."""
    worker.loop.settle()
    works = slotted(worker).hear()
    assert all(len(work.jobs) == 1 for work in works)
    return [item for work in works for item in read_items(work)]


def free(worker: FakeWorker, level: int = 0) -> int:
    demand = worker.pool.find_demand()
    assert demand is not None
    return demand.limit({SLOTS: 1}, level)


def test_slots_are_filled_at_once_and_again_as_they_become_free(worker: FakeWorker) -> None:
    assert free(worker) == 4
    worker.receive_each("a", "b", task=SLOTS, kwargs={"seed": 1})
    worker.receive_each("c", "d", "e", "f", task=SLOTS, kwargs={"seed": 2})
    worker.receive_each(1, 2)
    # Jobs of different keywords share the slots, in one line.
    assert running(worker) == ["a", "b", "c", "d"]
    assert free(worker) == 0
    slotted(worker).answer()
    assert running(worker)[4:] == ["e"]
    ordinary = next(each for each in worker.devices.started if not each.setups[0].task)
    assert worker.works(ordinary) == [[1, 2]]
    worker.work_off()
    assert free(worker) == 4


def test_items_of_one_job_count_and_free_their_slots_one_by_one(worker: FakeWorker) -> None:
    worker.receive(["a", "b", "c"], task=SLOTS, batchery={"v": 1, "n": 3})
    worker.receive_each("d", "e", "f", task=SLOTS)
    assert running(worker) == ["a", "b", "c", "d"]
    slotted(worker).say(Left(slotted(worker).works[0].id))
    assert running(worker) == ["a", "b", "c", "d", "e"]
    worker.work_off()
    assert free(worker) == 4


def test_jobs_of_a_higher_class_come_first(worker: FakeWorker) -> None:
    worker.receive_each(*"abcd", task=SLOTS, priority=9)
    assert len(running(worker)) == 4
    worker.receive("low", task=SLOTS, priority=9)
    worker.receive("high", task=SLOTS, priority=0)
    worker.loop.sleep(1.0)
    slotted(worker).answer()
    assert running(worker)[4:] == ["high"]


def test_what_made_room_and_went_on_makes_room_again(worker: FakeWorker) -> None:
    worker.receive_each(*"abcd", task=SLOTS, priority=9)
    assert len(running(worker)) == 4
    device = slotted(worker)
    # More than there are slots: each of those jobs makes room more than once.
    for live in "uvwxyz":
        worker.receive(live, task=SLOTS, priority=0)
        assert running(worker)[-1] == live
        work = device.works[-1]
        assert len(work.instead_of) == 4
        device.say(Done(work.id, (("needs tracer", ("value", live)),), 1.0, 0, 0))
        worker.loop.settle()
    for _ in "abcd":
        device.answer()
    worker.work_off()
    assert free(worker) == 4


def test_nobody_makes_room_in_a_model_that_does_not_resume(worker: FakeWorker) -> None:
    slotted(worker).say(Ready(slotted(worker).pid, 0.5, resumes=False))
    worker.receive_each(*"abcd", task=SLOTS, priority=9)
    assert len(running(worker)) == 4
    worker.receive_each("v", "w", task=SLOTS, priority=0)
    assert len(running(worker)) == 4
    slotted(worker).answer()
    assert running(worker)[4:] == ["v"]
    worker.work_off()
    assert free(worker) == 4


def test_of_several_that_made_room_the_first_goes_on_first(worker: FakeWorker) -> None:
    worker.receive_each(*"abcd", task=SLOTS, priority=9)
    assert len(running(worker)) == 4
    device = slotted(worker)
    ids = {read_items(work)[0]: work.id for work in device.works}
    worker.receive_each("v", "w", task=SLOTS, priority=0)
    assert running(worker)[4:] == ["v", "w"]
    # The last that came is asked first; then those that wait, as they may have a slot by now.
    first, second = (work.instead_of for work in device.works[4:])
    assert list(first) == [ids[name] for name in "dcba"]
    assert list(second) == [ids[name] for name in "cbad"]
    assert free(worker) == 2
    done = device.works[4]
    device.say(Done(done.id, (("needs tracer", ("value", "v")),), 1.0, 0, 0))
    worker.loop.settle()
    worker.receive("x", task=SLOTS, priority=0)
    assert running(worker)[6:] == ["x"]
    assert list(device.works[6].instead_of) == [ids[name] for name in "dbac"]
    worker.work_off()


def test_a_job_of_a_lower_class_is_here_when_its_turn_comes(worker: FakeWorker) -> None:
    worker.receive_each(*"abcd", task=SLOTS, priority=0)
    assert len(running(worker)) == 4
    assert (free(worker, 0), free(worker, 3), free(worker, 6)) == (0, 1, 1)
    worker.receive_each("high", task=SLOTS, priority=0)
    worker.receive_each("low", task=SLOTS, priority=6)
    assert len(running(worker)) == 4
    assert free(worker, 6) == 0
    worker.loop.sleep(1.0)
    slotted(worker).answer()
    assert running(worker)[4:] == ["low"]
    worker.work_off()


def test_a_flood_of_a_higher_class_takes_the_slots_of_its_share_at_once(worker: FakeWorker) -> None:
    worker.receive_each(*"abcd", task=SLOTS, priority=9)
    assert len(running(worker)) == 4
    worker.loop.sleep(1.0)
    # Nothing has ended, so nobody knows how long jobs of either class take.
    worker.receive_each(*"uvwx", task=SLOTS, priority=0)
    assert running(worker)[4:] == [*"uvw"]
    done = slotted(worker).works[4]
    slotted(worker).say(Done(done.id, (("needs tracer", ("value", "u")),), 1000.0, 0, 0))
    assert running(worker)[7:] == ["x"]
    worker.work_off()
    assert free(worker) == 4


def test_device_that_dies_runs_its_jobs_in_halves_and_no_others_meanwhile(
    worker: FakeWorker,
) -> None:
    requests = worker.receive_each("a", "b", "c", "d", task=SLOTS)
    assert len(running(worker)) == 4
    worker.receive("later", task=SLOTS)
    slotted(worker).die()
    worker.loop.sleep(1.0)
    assert running(worker) == ["a", "b"]
    slotted(worker).answer()
    # The next suspect takes the place, and nothing else does.
    assert running(worker) == ["a", "b", "c"]
    slotted(worker).die()
    worker.loop.sleep(1.0)
    # Of the two that died now, each runs alone; the fourth is of the larger group.
    assert running(worker) == ["d"]
    slotted(worker).answer()
    assert running(worker) == ["d", "b"]
    slotted(worker).die()
    worker.loop.sleep(1.0)
    assert running(worker) == ["c"]
    slotted(worker).answer()
    assert running(worker) == ["c", "b"]
    slotted(worker).die()
    worker.loop.sleep(2.0)
    assert running(worker) == ["later"]
    worker.work_off()
    with pytest.raises(DeviceDied):
        worker.result(requests[1].id)
    assert [worker.result(requests[place].id) for place in (0, 2, 3)] == ["a", "c", "d"]


def test_suspects_in_slots_hold_up_no_other_device(worker: FakeWorker) -> None:
    worker.receive("a", task=SLOTS)
    assert running(worker) == ["a"]
    slotted(worker).die()
    worker.loop.settle()
    worker.receive("b", task=FOUR)
    ordinary = next(each for each in worker.devices.started if not each.setups[0].task)
    assert worker.works(ordinary) == [["b"]]


def test_step_that_hangs_is_killed_some_seconds_after_the_limit(worker: FakeWorker) -> None:
    request = worker.receive("a", task=SLOTS)
    assert running(worker) == ["a"]
    first = slotted(worker)
    (work,) = first.works
    assert work.slot_limits.hard_s == 5
    worker.loop.sleep(5.0 + MAX_STEP_S - 0.1)
    assert first.code is None
    worker.loop.sleep(1.0)
    assert first.code is not None
    # Alone, it is to blame.
    worker.loop.sleep(5.0 + MAX_STEP_S + 1.0)
    with pytest.raises(TimeLimitExceeded, match="5"):
        worker.result(request.id)


def test_terminated_job_is_cancelled_and_its_process_killed_only_if_it_does_not_react(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def load(frame: bytes) -> object:
        told.append(load_message(frame))
        return told[-1]

    monkeypatch.setattr("support.fake_devices.load_message", load)
    request, mate = worker.receive_each("a", "b", task=SLOTS)
    assert running(worker) == ["a", "b"]
    (work,) = [each for each in told if isinstance(each, Work) and read_items(each) == ["a"]]
    request.terminate(worker.pool, "TERM")
    device = slotted(worker)
    worker.loop.settle()
    device.hear()
    assert Cancel(work.id) in told
    worker.loop.sleep(MAX_STEP_S + 1.0)
    assert device.code is not None
    worker.work_off()
    with pytest.raises(TaskRevokedError):
        worker.result(request.id)
    assert worker.result(mate.id) == "b"


def test_limits_of_batches_are_refused_for_a_model_with_slots() -> None:
    with pytest.raises(BatchArgumentError, match="max_batch_size = 8 has no meaning"):
        register(app, "refused", StepModel, max_batch_size=8)
    task: Any = app.tasks[SLOTS]
    assert task.max_batch_size == 1
