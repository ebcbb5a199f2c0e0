"""The size of batches under a target: by the cost model, or by what happens while that is new."""

import pytest

from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.batching.latency_target import LatencyTarget
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import BatchKey, Job, Lane, Limits

TASK = "embed"
LIMITS = Limits(64, target_s=0.1)


def learnt(pass_s: float = 0.005, item_s: float = 0.001) -> TaskCosts:
    """Costs of a task whose batches always took what they cost."""
    costs = TaskCosts()
    for number in range(200):
        items = 1 + number * 7 % 64
        costs.ran(TASK, items, pass_s + item_s * items)
    assert costs.is_believable(TASK)
    return costs


@pytest.mark.parametrize(
    ("target_s", "others", "items"),
    [
        # 5 ms and 39 items of 1 ms are 44 ms: so long may each of 2.25 batches take.
        (0.1, 0, 39),
        # Short batches are three, as the next one is sent at once: a third of 30 ms.
        (0.03, 0, 5),
        # Batches of other tasks take their part.
        (0.1, 2, 18),
        # One item runs whatever the target, and a large one leaves the maximum size.
        (0.001, 0, 1),
        (10.0, 0, 64),
    ],
)
def test_a_batch_has_as_many_items_as_the_target_allows(
    target_s: float, others: int, items: int
) -> None:
    target = LatencyTarget(Limits(64, target_s=target_s))
    found = target.max_items(TASK, learnt(), others=others)
    assert found == pytest.approx(items, abs=1 if 1 < items < 64 else 0)


def test_the_size_follows_what_happens_while_costs_are_unknown() -> None:
    target, costs = LatencyTarget(LIMITS), TaskCosts()
    assert target.max_items(TASK, costs, others=0) == 4
    for size in (4, 8, 12, 16, 20):
        target.ended(size, 0.02, others=0)
    assert target.max_items(TASK, costs, others=0) == 24
    # Between 80 % of what a batch may take and all of that nothing changes.
    target.ended(24, 0.04, others=0)
    assert target.max_items(TASK, costs, others=0) == 24
    # A batch far below the size says nothing about one of that size.
    target.ended(11, 0.001, others=0)
    assert target.max_items(TASK, costs, others=0) == 24
    target.ended(24, 0.055, others=0)
    assert target.max_items(TASK, costs, others=0) == 21
    # With two other tasks a batch may take half of that.
    target.ended(21, 0.03, others=2)
    assert target.max_items(TASK, costs, others=0) == 19
    for _ in range(100):
        target.ended(64, 0.2, others=0)
    assert target.max_items(TASK, costs, others=0) == 1
    for _ in range(100):
        target.ended(64, 0.0, others=0)
    assert target.max_items(TASK, costs, others=0) == 64


@pytest.mark.parametrize(("sharers", "items"), [(1, 39), (3, 18)])
def test_a_full_batch_is_one_of_the_size_that_the_target_allows(sharers: int, items: int) -> None:
    """With three devices on a card, a batch of each of the others comes in between."""
    scheduler: Scheduler[None] = Scheduler(costs=learnt(), sharers=sharers)
    for number in range(100):
        scheduler.admit(Job(str(number), BatchKey(TASK), LIMITS, 1, 0.0, None))
    sizes = []
    # A busy device gets full batches only, and this is as full as they may be.
    while (batch := scheduler.next_batch(1, False, 0.0)) is not None:
        sizes.append(batch.items)
    assert sizes == [pytest.approx(items, abs=1)] * (100 // items)


def test_keywords_of_one_tenant_do_not_cut_the_batches_of_another() -> None:
    """The budget counts shares: with 30 keys of another, between two batches comes one of it."""
    sizes = []
    for keys in (1, 30):
        scheduler: Scheduler[None] = Scheduler(costs=learnt())
        for number in range(64 * (keys + 1)):
            key = BatchKey(TASK, str(1 + number % keys))
            scheduler.admit(Job("", key, LIMITS, 1, 0.0, None, Lane("high", "noisy")))
            scheduler.admit(Job("", BatchKey(TASK), LIMITS, 1, 0.0, None, Lane("high", "quiet")))
        batches = [scheduler.next_batch(0, False, 0.0) for _ in range(60)]
        quiet = [each for each in batches if each and not each.jobs[0].key.keywords]
        sizes.append(quiet[0].items)
    # 5 ms and 25 items of 1 ms: a 3.25th of 100 ms.
    assert sizes == [pytest.approx(25, abs=1)] * 2


def test_a_target_counts_classes_by_their_shares() -> None:
    scheduler: Scheduler[None] = Scheduler({"high": 80.0, "low": 20.0}, learnt())
    for number in range(100):
        for name in ("high", "low"):
            lane = Lane(name, str(number) if name == "low" else "")
            scheduler.admit(Job("", BatchKey(TASK, name), LIMITS, 1, 0.0, None, lane))
    high, low = (scheduler.next_batch(0, False, 0.0) for _ in range(2))
    assert high is not None
    assert low is not None
    # A 2.5th of the target; and a 7th, as such batches are short.
    assert [high.items, low.items] == [pytest.approx(34, abs=1), pytest.approx(9, abs=1)]


def test_the_scheduler_learns_from_batches_that_are_back() -> None:
    scheduler: Scheduler[None] = Scheduler()

    def run(took_s: float) -> int:
        for number in range(64):
            scheduler.admit(Job(str(number), BatchKey(TASK), LIMITS, 1, 0.0, None))
        batch = scheduler.next_batch(0, False, 0.0)
        assert batch is not None
        scheduler.ended(batch, took_s)
        scheduler.clear()
        return batch.items

    assert [run(0.01), run(0.01), run(0.5), run(0.5)] == [4, 8, 12, 10]
