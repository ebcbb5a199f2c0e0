"""Shares: who gets how much of a device's time, with batches whose cost is known to the test."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import UNKNOWN_ITEM_S, TaskCosts
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.batching.shares import Shares
from batchery_worker.job import BatchKey, Job, Lane, Limits

SHARES = {"high": 50.0, "normal": 30.0, "low": 20.0}
HIGH, NORMAL, LOW = (Lane(name) for name in SHARES)
EMBED, LABEL = BatchKey("embed"), BatchKey("label")

Who = tuple[BatchKey, Lane]


class Device:
    """One device that is never idle: it runs batch after batch, and says for whom."""

    def __init__(
        self, item_s: Callable[[str], float], max_batch_size: int = 16, batch_s: float = 0.0
    ) -> None:
        self.scheduler: Scheduler[None] = Scheduler(SHARES)
        self.given_s: dict[Who, float] = defaultdict(float)
        #: Lanes in the order in which their jobs ran, by batch.
        self.batches: list[Counter[Who]] = []
        self._item_s = item_s
        self._batch_s = batch_s
        self._limits = Limits(max_batch_size)
        self._numbers = itertools.count()

    def send(self, key: BatchKey, lane: Lane, count: int, items: int = 1) -> None:
        for _ in range(count):
            self.scheduler.admit(
                Job(str(next(self._numbers)), key, self._limits, items, 0.0, None, lane)
            )

    def run(self, batches: int) -> None:
        for _ in range(batches):
            batch = self.scheduler.next_batch(0, False, 0.0)
            assert batch is not None
            key = batch.jobs[0].key
            run_s = self._batch_s + self._item_s(key.task) * batch.items
            who: Counter[Who] = Counter()
            for job in batch.jobs:
                who[job.key, job.lane] += job.items
                self.given_s[job.key, job.lane] += run_s * job.items / batch.items
            self.batches.append(who)
            self.scheduler.ended(batch, run_s)

    def share(self, who: Who) -> float:
        return self.given_s[who] / sum(self.given_s.values())


def test_classes_have_their_shares_of_each_batch() -> None:
    device = Device(lambda _: 0.01, max_batch_size=10)
    for lane in (LOW, HIGH, NORMAL):
        device.send(EMBED, lane, 1000)
    device.run(50)
    for lane, share in zip((HIGH, NORMAL, LOW), (0.5, 0.3, 0.2), strict=True):
        assert device.share((EMBED, lane)) == pytest.approx(share, abs=0.01)
        assert all(abs(batch[EMBED, lane] - 10 * share) <= 1 for batch in device.batches)


def test_what_a_batch_costs_besides_its_items_is_shared_too() -> None:
    device = Device(lambda _: 0.001, batch_s=0.05)
    device.send(EMBED, HIGH, 10_000, items=3)
    device.send(LABEL, HIGH, 10_000, items=16)
    device.run(500)
    assert device.share((EMBED, HIGH)) == pytest.approx(0.5, abs=0.02)


def test_a_tenant_with_one_job_does_not_wait_behind_a_hundred_thousand() -> None:
    device = Device(lambda _: 0.01)
    device.send(EMBED, Lane("low", "many"), 100_000)
    device.run(20)
    device.send(EMBED, Lane("low", "one"), 1)
    device.run(1)
    assert device.batches[-1][EMBED, Lane("low", "one")] == 1


def test_after_a_first_batch_that_took_half_a_minute_a_live_job_is_in_the_next_one() -> None:
    scheduler = Device(lambda _: 0.01).scheduler
    limits = Limits(16)
    for number in range(1000):
        scheduler.admit(Job(str(number), EMBED, limits, 1, 0.0, None, LOW))
    sent = [scheduler.next_batch(held, False, 0.0) for held in (0, 1)]
    for run_s in (30.0, 0.1, 0.1, 0.1):
        first = sent.pop(0)
        assert first is not None
        scheduler.ended(first, run_s)
        sent.append(scheduler.next_batch(1, False, 0.0))
    scheduler.admit(Job("live", EMBED, limits, 1, 0.0, None, HIGH))
    batch = scheduler.next_batch(1, False, 0.0)
    assert batch is not None
    assert "live" in [job.id for job in batch.jobs]


def test_many_tenants_share_what_their_class_has_and_what_a_silent_one_leaves() -> None:
    device = Device(lambda _: 0.01)
    tenants = [Lane("low", str(number)) for number in range(10)]
    for tenant in tenants:
        device.send(EMBED, tenant, 1000)
    device.send(EMBED, HIGH, 5000)
    device.run(200)
    assert device.share((EMBED, HIGH)) == pytest.approx(5 / 7, abs=0.02)
    for tenant in tenants:
        assert device.share((EMBED, tenant)) == pytest.approx(2 / 70, abs=0.01)


def test_jobs_of_several_keywords_have_no_larger_share() -> None:
    device = Device(lambda _: 0.01)
    keys = [BatchKey("embed", f'{{"dimensions":{size}}}') for size in range(1, 6)]
    for key in keys:
        device.send(key, HIGH, 1000)
    device.send(LABEL, HIGH, 5000)
    device.run(300)
    assert device.share((LABEL, HIGH)) == pytest.approx(0.5, abs=0.03)


def test_who_took_what_nobody_else_wanted_does_not_pay_for_it_later() -> None:
    device = Device(lambda _: 0.001)
    running = None
    # `low` asks for more than its share, but each batch takes all that waits, and the next jobs
    # come while it runs: the device is always busy, and nobody is ever held up.
    for _ in range(200):
        device.send(EMBED, HIGH, 1)
        device.send(EMBED, LOW, 10)
        batch = device.scheduler.next_batch(0, False, 0.0)
        assert batch is not None
        assert batch.items == 11
        if running is not None:
            device.scheduler.ended(running, 0.011)
        running = batch
    device.send(EMBED, HIGH, 1000)
    device.send(EMBED, LOW, 1000)
    assert running is not None
    device.scheduler.ended(running, 0.011)
    device.run(20)
    assert device.share((EMBED, LOW)) == pytest.approx(2 / 7, abs=0.03)


def test_who_has_a_batch_running_is_behind_one_who_has_none() -> None:
    device = Device(lambda _: 0.001)
    device.send(EMBED, HIGH, 16)
    running = device.scheduler.next_batch(0, False, 0.0)
    assert running is not None
    device.send(EMBED, HIGH, 16)
    device.send(LABEL, HIGH, 16)
    batch = device.scheduler.next_batch(0, False, 0.0)
    assert batch is not None
    assert batch.jobs[0].key == LABEL


def test_a_batch_whose_device_died_keeps_its_estimate() -> None:
    shares = Shares(SHARES, TaskCosts())
    flow = shares.wake(EMBED, HIGH)
    shares.began(flow.tag)
    charge = shares.charge(flow, 4, shares.item_s("embed", 4))
    tag = flow.tag
    shares.ended([charge], None)
    assert flow.tag == tag == pytest.approx(4 * UNKNOWN_ITEM_S / 50)


def test_who_is_forgiven_owes_only_what_still_runs() -> None:
    shares = Shares(SHARES, TaskCosts())
    flow = shares.wake(EMBED, HIGH)
    shares.began(flow.tag)
    back, _ = (shares.charge(flow, 4, UNKNOWN_ITEM_S) for _ in range(2))
    shares.sleep(flow)
    shares.ended([back], 4 * UNKNOWN_ITEM_S)
    assert shares.wake(EMBED, HIGH) is flow
    assert flow.tag == pytest.approx(4 * UNKNOWN_ITEM_S / 50)


def test_a_lane_is_charged_its_items_share_of_the_whole_batch() -> None:
    costs = TaskCosts()
    for items in (1, 31) * 100:
        costs.ran("embed", items, 0.1 + 0.01 * items)
    scheduler: Scheduler[None] = Scheduler(SHARES, costs)
    for number, lane in enumerate([HIGH] * 9 + [LOW]):
        scheduler.admit(Job(str(number), EMBED, Limits(10), 1, 0.0, None, lane))
    batch = scheduler.next_batch(0, False, 0.0)
    assert batch is not None
    # A batch of one would take 0.11 s, and this one takes no ten times as long.
    estimates_s = {charge.flow.lane: charge.estimate_s for charge in batch.charges}
    assert estimates_s == pytest.approx({HIGH: 0.9 * 0.2, LOW: 0.1 * 0.2}, rel=0.02)


def test_a_correction_is_right_however_wrong_the_estimate_was() -> None:
    costs = TaskCosts()
    costs.ran("embed", 4, 40.0)
    shares = Shares(SHARES, costs)
    flow = shares.wake(EMBED, HIGH)
    shares.began(flow.tag)
    charge = shares.charge(flow, 4, shares.item_s("embed", 4))
    assert flow.tag == pytest.approx(40.0 / 50)
    shares.ended([charge], 0.5)
    assert flow.tag == pytest.approx(0.5 / 50)
    # And it was learned.
    assert shares.item_s("embed", 4) == pytest.approx(0.5 / 4)


class Stream:
    """Tenants that come once: one with one job for each job of such a tenant that ran."""

    def __init__(self, device: Device, keys: list[BatchKey], name: str, waiting: int) -> None:
        self.device = device
        self.waiting = waiting
        self._keys = itertools.cycle(keys)
        self._name = name
        self._numbers = itertools.count()
        self.come(waiting)

    def come(self, count: int) -> None:
        for number in itertools.islice(self._numbers, count):
            self.device.send(next(self._keys), Lane(self._name, f"once {number}"), 1)

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.device.run(1)
            ran = self.device.batches[-1].items()
            self.come(sum(jobs for (_, lane), jobs in ran if lane.tenant.startswith("once")))


@given(
    costs_s=st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3),
    name=st.sampled_from(list(SHARES)),
    waiting=st.integers(1, 40),
    max_batch_size=st.integers(1, 32),
    has_bulk=st.booleans(),
)
def test_what_is_remembered_of_tenants_that_come_once_is_bounded(
    costs_s: list[float], name: str, waiting: int, max_batch_size: int, has_bulk: bool
) -> None:
    cost_s = {f"task {number}": each for number, each in enumerate(costs_s)}
    device = Device(cost_s.__getitem__, max_batch_size)
    if has_bulk:
        # No more than 400 batches can take.
        device.send(BatchKey("task 0"), HIGH, min(50_000 // max_batch_size, 400 * max_batch_size))
    stream = Stream(device, list(map(BatchKey, cost_s)), name, waiting)
    for _ in range(20):
        stream.run(20)
        # They are forgotten when those that wait have had as much, by their shares: up to five
        # times as many come meanwhile, and one of a slow task stays while many of fast ones go.
        assert len(device.scheduler._shares) <= 10 * (waiting + max_batch_size)
        assert len(device.scheduler._shares._owing) <= 10 * (waiting + max_batch_size)
        classes = device.scheduler._shares._classes.values()
        assert sum(len(each.tenants) for each in classes) <= 10 * (waiting + max_batch_size)


@pytest.mark.parametrize("name", list(SHARES))
@pytest.mark.parametrize("key", [EMBED, LABEL])
def test_tenants_that_come_once_have_no_more_than_the_share_of_their_class(
    key: BatchKey, name: str
) -> None:
    device = Device(lambda _: 0.01)
    device.send(EMBED, Lane("normal", "stays"), 14_000)
    device.run(200)
    device.given_s.clear()
    stream = Stream(device, [key], name, 31)
    stream.run(500)
    # In the class of the one that stays, each of 32 has the same.
    expected = 1 / 32 if name == "normal" else 30 / (30 + SHARES[name])
    share = device.share((EMBED, Lane("normal", "stays")))
    assert share == pytest.approx(expected, rel=0.15)


@given(
    costs_s=st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3),
    max_batch_size=st.integers(1, 16),
    away=st.integers(0, 30),
    waiting=st.integers(0, 20),
)
def test_who_leaves_and_returns_neither_gains_nor_loses(
    costs_s: list[float], max_batch_size: int, away: int, waiting: int
) -> None:
    """Also beside tenants that come once, and after a time in which others went on."""
    cost_s = dict(zip(("embed", "label", "once"), costs_s, strict=True))
    device = Device(cost_s.__getitem__, max_batch_size)
    returns, stays = (EMBED, HIGH), (LABEL, LOW)
    device.send(*stays, 5000)
    stream = Stream(device, [BatchKey("once")], "normal", waiting)
    stream.run(away)
    device.given_s.clear()
    bound = sum(
        3 * cost_s[key.task] * max_batch_size / SHARES[lane.priority_class]
        for key, lane in (returns, stays, (BatchKey("once"), NORMAL))
    )
    device.send(*returns, 1)
    for _ in range(200):
        stream.run(1)
        # All of its jobs are in each of its batches, and the next ones come when they are back.
        if device.batches[-1][returns]:
            device.send(*returns, max_batch_size)
        first, second = (
            device.given_s[who] / SHARES[who[1].priority_class] for who in (returns, stays)
        )
        assert abs(first - second) <= bound


@given(
    costs_s=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=2),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    lanes=st.lists(st.sampled_from([HIGH, NORMAL, LOW]), min_size=2, max_size=2, unique=True),
    max_batch_size=st.integers(1, 16),
)
def test_two_that_both_wait_never_differ_by_more_than_two_batches_of_each(
    costs_s: list[float], sizes: list[int], lanes: list[Lane], max_batch_size: int
) -> None:
    """The bound of start-time fair queueing, with one batch more of each for good measure."""
    cost_s = dict(zip(("embed", "label"), costs_s, strict=True))
    device = Device(cost_s.__getitem__, max_batch_size)
    both = list(zip((EMBED, LABEL), lanes, strict=True))
    for (key, lane), items in zip(both, sizes, strict=True):
        device.send(key, lane, 400, items)
    bound = sum(
        2 * cost_s[key.task] * max(items, max_batch_size) / SHARES[lane.priority_class]
        for (key, lane), items in zip(both, sizes, strict=True)
    )
    for _ in range(20):
        device.run(1)
        first, second = (device.given_s[who] / SHARES[who[1].priority_class] for who in both)
        assert abs(first - second) <= bound


def test_classes_of_a_batch_that_is_back_count_though_none_of_their_jobs_waits() -> None:
    shares = Shares(SHARES, TaskCosts())
    shares.wake(EMBED, HIGH)
    assert shares.others(50.0) == 0
    assert shares.others(50.0, {"low"}) == pytest.approx(0.4)


def test_newcomers_of_one_tenant_have_one_share_together_however_many_keys_they_have() -> None:
    shares = Shares(SHARES, TaskCosts())
    keys = [BatchKey("embed", str(number)) for number in range(4)]
    flows = [shares.wake(key, LOW) for key in keys]
    other = shares.wake(EMBED, Lane("low", "another"))
    shares.began(0.0)
    # A share of 20 for two tenants, both new: each of the four keys has a quarter of its half.
    assert shares.weight(flows[0]) == pytest.approx(2.5)
    assert shares.charge(flows[0], 1, 1.0).newcomers == pytest.approx(20.0)
    shares.began(0.0)
    # Three quarters of the one tenant, and the other.
    assert shares.charge(other, 1, 1.0).newcomers == pytest.approx(17.5)


class LoadingDevice(Device):
    """The same, where each batch has to load its model first, if its class is high."""

    load_s = 0.2

    def run(self, batches: int) -> None:
        ended = self.scheduler.ended

        def end(batch: Any, run_s: float | None, load_s: float = 0.0) -> None:
            for charge in batch.charges:
                if charge.flow.lane.priority_class == "high":
                    load_s = self.load_s
                    self.given_s[charge.flow.key, charge.flow.lane] += load_s
            ended(batch, run_s, load_s)

        with patch.object(self.scheduler, "ended", end):
            super().run(batches)


def test_classes_and_tenants_pay_for_the_loads_of_their_models() -> None:
    device = LoadingDevice(lambda _: 0.01)
    tasks = [BatchKey(f"task {number}") for number in range(20)]
    others = (EMBED, NORMAL), (LABEL, Lane("high", "acme"))
    for key in tasks:
        device.send(key, HIGH, 16_000)
    device.send(*others[0], 160_000)
    device.run(1000)
    assert device.share(others[0]) == pytest.approx(30 / 80, rel=0.02)
    # Its own tasks have the rest in equal parts.
    shares = [device.share((key, HIGH)) for key in tasks]
    assert max(shares) < 1.1 * min(shares)


def test_loads_of_one_tenant_are_not_paid_by_another() -> None:
    device = LoadingDevice(lambda _: 0.01)
    loads, other = Lane("high", "loads"), Lane("high", "other")
    device.send(EMBED, loads, 16_000)
    device.send(LABEL, other, 160_000)
    device.load_s = 0.0
    device.run(100)
    ended, device.given_s[LABEL, other] = device.scheduler.ended, 0.0
    device.given_s[EMBED, loads] = 0.0

    def end(batch: Any, run_s: float | None) -> None:
        is_load = batch.jobs[0].lane == loads
        device.given_s[EMBED, loads] += 0.2 * is_load
        ended(batch, run_s, 0.2 * is_load)

    with patch.object(device.scheduler, "ended", end):
        Device.run(device, 500)
    assert device.share((EMBED, loads)) == pytest.approx(0.5, abs=0.01)


def test_who_comes_after_the_loads_of_its_tenant_pays_for_them_too() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)

    def send(key: BatchKey, lane: Lane) -> None:
        scheduler.admit(Job("id", key, Limits(1), 1, 0.0, None, lane))

    send(EMBED, HIGH)
    batch = scheduler.next_batch(0, False, 0.0)
    assert batch is not None
    for _ in range(100):
        send(LABEL, LOW)
    scheduler.ended(batch, 0.01, 10.0)
    send(BatchKey("new"), HIGH)
    send(BatchKey("new"), Lane("high", "acme"))
    order = []
    for _ in range(102):
        batch = scheduler.next_batch(0, False, 0.0)
        assert batch is not None
        order.append(batch.jobs[0].lane)
        scheduler.ended(batch, 0.1)
    # 10 s of a share of 50 are 4 s of one of 20.
    assert order.index(Lane("high", "acme")) <= 1
    assert order.index(HIGH) == pytest.approx(41, abs=2)
    assert not scheduler._shares._asleep.keys() - {(LABEL, LOW), (BatchKey("new"), HIGH)}
