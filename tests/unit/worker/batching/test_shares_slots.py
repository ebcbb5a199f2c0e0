"""Shares of slots: jobs whose length nobody knows are charged as they run."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.batching.shares import SLOT_AHEAD_S, Charge, Shares
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

SHARES = {"high": 50.0, "low": 20.0}
HIGH, LOW = Lane("high"), Lane("low")
CHAT = BatchKey("chat")

#: Time between two decisions of the tests, in seconds.
LOOK_S = 0.1


@pytest.fixture
def shares() -> Shares:
    return Shares(SHARES, TaskCosts(), in_slots=True)


def begin(shares: Shares, lane: Lane, count: int = 1) -> list[Charge]:
    """Jobs of one slot each that begin together; their lane has no other that waits."""
    flow = shares.wake(CHAT, lane)
    charges = [shares.charge(flow, 1, 0.001) for _ in range(count)]
    shares.sleep(flow)
    return charges


@given(
    looks=st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 3)), max_size=8),
    run_s=st.none() | st.floats(0.0, 200.0),
)
def test_a_job_is_charged_once_for_what_it_had_however_often_that_is_asked(
    looks: list[tuple[float, int]], run_s: float | None
) -> None:
    shares = Shares(SHARES, TaskCosts(), in_slots=True)
    flow = shares.wake(CHAT, LOW)
    charge = shares.charge(flow, 3, 0.001)
    for had_s, slots in looks:
        shares.progress(charge, had_s, slots)
        # What it had, and a little in advance for each slot that it has now.
        assert flow.running == pytest.approx(SLOT_AHEAD_S * slots / 20)
        assert flow.tag == pytest.approx((charge.had_s + SLOT_AHEAD_S * slots) / 20)
    had_s = sum(had_s for had_s, _ in looks)
    shares.ended([charge], run_s)
    assert flow.running == pytest.approx(0.0)
    if run_s is not None:
        assert flow.tag == pytest.approx(run_s / 20)
    elif looks:
        # Its device died: so far is what is known.
        assert flow.tag == pytest.approx((had_s or SLOT_AHEAD_S * looks[-1][1]) / 20)


def test_who_had_all_slots_while_nobody_else_wanted_them_owes_one_job_at_most(
    shares: Shares,
) -> None:
    (first, *others) = begin(shares, LOW, 16)
    for charge in (first, *others):
        shares.progress(charge, 100.0, 1)
    # None of its jobs waits, as far as this worker knows.
    assert first.flow.tag - first.flow.running == pytest.approx(80.0)
    assert shares.wake(CHAT, HIGH).tag == pytest.approx(75.0)
    assert first.flow.tag - first.flow.running == pytest.approx(75.0)
    # Now some do.
    shares.wake(CHAT, LOW)
    for charge in (first, *others):
        shares.progress(charge, 10.0, 1)
    assert first.flow.tag - first.flow.running == pytest.approx(83.0)
    assert shares.wake(CHAT, Lane("high", "other")).tag == pytest.approx(83.0 - 110.0 / 20)


def test_who_was_silent_saves_up_nothing_though_it_has_slots(shares: Shares) -> None:
    (live,) = begin(shares, HIGH)
    (bulk,) = begin(shares, LOW)
    shares.progress(live, 100.0, 1)
    shares.progress(bulk, 100.0, 1)
    (later,) = begin(shares, LOW)
    shares.progress(later, 0.0, 1)
    # It had 100 of 200 seconds, and five sevenths are its share. But it did not want more.
    live_tag = shares.wake(CHAT, HIGH).tag
    assert live_tag - live.flow.running == pytest.approx(bulk.flow.tag - bulk.flow.running)


def test_newcomers_are_charged_together_as_they_run(shares: Shares) -> None:
    flow = shares.wake(CHAT, Lane("low", "one"))
    shares.began(0.0)
    charge = shares.charge(flow, 1, 0.001)
    shares.progress(charge, 30.0, 1)
    assert shares.wake(CHAT, Lane("low", "other")).tag == pytest.approx(30.0 / 20)
    shares.ended([charge], 40.0)
    assert shares.wake(CHAT, Lane("low", "third")).tag == pytest.approx(40.0 / 20)


class Slots:
    """A device with 16 slots, as the dispatcher has one."""

    def __init__(self) -> None:
        self.scheduler: Scheduler[None] = Scheduler(SHARES, in_slots=True)
        self.running: list[Batch[None]] = []
        self.aside: list[Batch[None]] = []
        self._numbers = itertools.count()

    def send(self, lane: Lane) -> None:
        job = Job(str(next(self._numbers)), CHAT, Limits(1), 1, 0.0, None, lane)
        self.scheduler.admit(job)

    def fill(self) -> None:
        while len(self.running) < 16:
            batch = self.scheduler.next_batch(len(self.running), False, 0.0)
            if batch is None:
                return
            self.running.append(batch)
        while True:
            victim = next(b for b in self.running[::-1] if b.jobs[0].lane == LOW)
            batch = self.scheduler.urgent_batch([victim], 0.0)
            if batch is None:
                return
            self.running.remove(victim)
            self.scheduler.progress(victim, 0.0, 0)
            self.aside.append(victim)
            self.running.append(batch)

    def look(self) -> None:
        for batch in self.running:
            self.scheduler.progress(batch, LOOK_S, 1)
        self.fill()

    def count(self) -> Counter[str]:
        return Counter(batch.jobs[0].lane.priority_class for batch in self.running)


@pytest.mark.parametrize("alone_s", [0.0, 1.0, 60.0])
def test_live_jobs_take_slots_of_bulk_at_once_up_to_their_share(alone_s: float) -> None:
    device = Slots()
    for _ in range(16):
        device.send(LOW)
    for _ in range(1 + round(alone_s / LOOK_S)):
        device.look()
    for number in range(1, 12):
        device.send(HIGH)
        device.fill()
        assert device.count() == {"high": number, "low": 16 - number}
        device.look()


def test_a_flood_of_live_jobs_has_its_share_and_no_more() -> None:
    device = Slots()
    for _ in range(16):
        device.send(LOW)
    device.fill()
    for _ in range(100):
        device.send(HIGH)
    device.fill()
    assert device.count() == {"high": 12, "low": 4}
    for _ in range(100):
        device.look()
    assert device.count() == {"high": 12, "low": 4}
