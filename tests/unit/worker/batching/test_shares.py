"""Shares: who gets how much of a device's time, with batches whose cost is known to the test."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching import shares as module
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.batching.shares import Shares
from batchery_worker.job import BatchKey, Job, Lane, Limits

SHARES = {"high": 50.0, "normal": 30.0, "low": 20.0}
HIGH, NORMAL, LOW = (Lane(name) for name in SHARES)
EMBED, LABEL = BatchKey("embed"), BatchKey("label")

Who = tuple[BatchKey, Lane]


class Device:
    """One device that is never idle: it runs batch after batch, and says for whom."""

    def __init__(self, item_s: Callable[[str], float], max_batch_size: int = 16) -> None:
        self.scheduler: Scheduler[None] = Scheduler(SHARES)
        self.given_s: dict[Who, float] = defaultdict(float)
        #: Lanes in the order in which their jobs ran, by batch.
        self.batches: list[Counter[Who]] = []
        self._item_s = item_s
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
            run_s = self._item_s(key.task) * batch.items
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


def test_the_share_of_a_silent_class_goes_to_the_others() -> None:
    device = Device(lambda _: 0.01)
    device.send(EMBED, HIGH, 2000)
    device.send(EMBED, LOW, 2000)
    device.run(100)
    assert device.share((EMBED, HIGH)) == pytest.approx(5 / 7, abs=0.01)
    assert device.share((EMBED, LOW)) == pytest.approx(2 / 7, abs=0.01)


def test_a_slow_model_has_its_share_of_the_time_not_of_the_turns() -> None:
    device = Device(lambda task: 0.1 if task == "embed" else 0.001)
    device.send(EMBED, HIGH, 2000)
    device.send(LABEL, HIGH, 100_000)
    device.run(1500)
    assert device.share((EMBED, HIGH)) == pytest.approx(0.5, abs=0.02)


def test_a_tenant_with_one_job_does_not_wait_behind_a_hundred_thousand() -> None:
    device = Device(lambda _: 0.01)
    device.send(EMBED, Lane("low", "many"), 100_000)
    device.run(20)
    device.send(EMBED, Lane("low", "one"), 1)
    device.run(1)
    assert device.batches[-1][EMBED, Lane("low", "one")] == 1


def test_many_tenants_share_what_their_class_has() -> None:
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


def test_who_was_silent_has_saved_up_nothing() -> None:
    device = Device(lambda _: 0.01)
    device.send(EMBED, LOW, 10_000)
    device.run(300)
    before_s = device.given_s[EMBED, LOW]
    device.send(EMBED, HIGH, 5000)
    device.run(70)
    low_s = device.given_s[EMBED, LOW] - before_s
    assert low_s / (low_s + device.given_s[EMBED, HIGH]) == pytest.approx(2 / 7, abs=0.02)


def test_a_batch_whose_device_died_keeps_its_estimate() -> None:
    shares = Shares(SHARES)
    flow = shares.wake(EMBED, HIGH)
    shares.began(flow.tag)
    charge = shares.charge(flow, 4)
    tag = flow.tag
    shares.ended([charge], None)
    assert flow.tag == tag == pytest.approx(4 * module.UNKNOWN_ITEM_S / 50)


def test_lanes_that_owe_nothing_are_forgotten() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    scheduler.admit(Job("bulk", EMBED, Limits(1), 1, 0.0, None, HIGH))
    for number in range(5 * module.MAX_ASLEEP):
        tenant = Lane("low", str(number))
        scheduler.admit(Job(str(number), LABEL, Limits(8), 1, 0.0, None, tenant))
        batch = scheduler.next_batch(0, False, 0.0)
        assert batch is not None
        scheduler.ended(batch, 0.001)
    assert len(scheduler._shares._asleep) <= module.MAX_ASLEEP + 1


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
