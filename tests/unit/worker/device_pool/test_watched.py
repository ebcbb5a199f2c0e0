"""How long a batch may still run, by what its device says."""

import pytest

from batchery_worker.device_pool.watched import MAX_STEP_S, WatchedBatches
from batchery_worker.ipc.messages import Began, Ended, Loaded, Loads, ResultsWait, Running

LIMIT_S = 5.0
LOAD_TIMEOUT_S = 60.0


class Device:
    """The batches of a device, and a clock."""

    def __init__(self) -> None:
        self.batches = WatchedBatches()

    def say(self, *replies: object, at_s: float) -> None:
        for reply in replies:
            self.batches.note(reply, at_s, LOAD_TIMEOUT_S)  # type: ignore[arg-type]

    def find_due(self, now_s: float) -> int | None:
        due = self.batches.find_due(now_s)
        return None if due is None else due.told.id


@pytest.fixture
def device() -> Device:
    return Device()


def running(number: int, *, limit_s: float | None = LIMIT_S, **options: bool) -> Running:
    return Running(number, "work", [f"job {number}"], limit_s, **options)


def test_time_of_a_batch_begins_when_the_one_before_has_ended(device: Device) -> None:
    device.say(running(1, limit_s=None), running(2), at_s=0.0)
    device.say(Ended(1), at_s=100.0)
    assert (device.find_due(104.9), device.find_due(105.0)) == (None, 2)
    device.say(Ended(2), at_s=105.0)
    assert device.find_due(1e9) is None


def test_time_of_an_urgent_batch_is_not_that_of_what_it_interrupts(device: Device) -> None:
    device.say(running(1), at_s=0.0)
    device.say(running(2, is_urgent=True), at_s=1.0)
    assert device.find_due(5.0) == 1
    device.say(Began(2), at_s=3.0)
    assert (device.find_due(7.9), device.find_due(8.0)) == (None, 2)
    device.say(Ended(2), at_s=7.0)
    assert (device.find_due(8.9), device.find_due(9.0)) == (None, 1)


def test_a_load_has_the_time_of_a_start_and_none_of_its_batch(device: Device) -> None:
    device.say(running(1), Loads(1, 2.0), at_s=0.0)
    assert (device.find_due(LOAD_TIMEOUT_S - 1), device.find_due(LOAD_TIMEOUT_S)) == (None, 1)
    device.say(Loaded(1), at_s=50.0)
    assert (device.find_due(54.9), device.find_due(55.0)) == (None, 1)


def test_time_in_which_redis_may_be_away_does_not_count(device: Device) -> None:
    device.say(running(1), at_s=0.0)
    device.say(ResultsWait(1), at_s=4.0)
    assert device.find_due(1e9) is None
    device.say(ResultsWait(1, is_over=True), at_s=100.0)
    assert (device.find_due(100.9), device.find_due(101.0)) == (None, 1)


def test_a_batch_that_nobody_wants_any_more_has_little_time(device: Device) -> None:
    device.say(running(1, limit_s=None), at_s=0.0)
    device.say(running(1, limit_s=None, is_unwanted=True), at_s=7.0)
    assert device.find_due(6.9 + MAX_STEP_S) is None
    assert device.find_due(7.0 + MAX_STEP_S) == 1
    device.batches[1].expired = True
    assert device.find_due(1e9) is None
