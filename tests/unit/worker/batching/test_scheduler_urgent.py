"""What goes before the rest of a batch that runs, and what does not."""

from collections import Counter

import pytest

from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

SHARES = {"high": 50.0, "normal": 30.0, "low": 20.0}
HIGH, NORMAL, LOW = (Lane(name) for name in SHARES)
EMBED, LABEL = BatchKey("embed"), BatchKey("label")


def urgent_scene(
    bulk: int = 100, *, sheds_late: bool = False
) -> tuple[Scheduler[None], Batch[None]]:
    """A scheduler whose device runs a batch of low jobs, with more of them behind."""
    costs = TaskCosts()
    for items in range(1, 40):
        # An item takes a second.
        costs.ran(EMBED.task, items, float(items))
    scheduler: Scheduler[None] = Scheduler(SHARES, costs, sheds_late=sheds_late)
    for number in range(bulk):
        scheduler.admit(Job(str(number), EMBED, Limits(10), 1, 0.0, None, LOW))
    running = scheduler.next_batch(0, False, 0.0) or Batch(())
    return scheduler, running


def live(scheduler: Scheduler[None], *names: str, lane: Lane = HIGH) -> None:
    for name in names:
        scheduler.admit(Job(name, EMBED, Limits(10), 1, 0.0, None, lane))


def names_of(batch: Batch[None] | None) -> list[str]:
    return [] if batch is None else [job.id for job in batch.jobs]


def test_a_higher_class_goes_before_the_rest_of_a_batch_that_runs() -> None:
    scheduler, running = urgent_scene()
    assert scheduler.urgent_batch([running], 0.0) is None
    live(scheduler, "one", "two")
    live(scheduler, "three", lane=NORMAL)
    assert sorted(names_of(scheduler.urgent_batch([running], 0.0))) == ["one", "three", "two"]
    assert scheduler.urgent_batch([running], 0.0) is None


def test_nothing_is_prepared_before_what_waits_to_be_urgent() -> None:
    scheduler, running = urgent_scene()
    live(scheduler, "live")
    # An urgent batch is on the device, so this one waits for its turn; low must not overtake it.
    assert scheduler.next_batch(1, False, 0.0, [running]) is None
    assert names_of(scheduler.urgent_batch([running], 0.0)) == ["live"]
    assert len(names_of(scheduler.next_batch(1, False, 0.0, [running]))) == 10


def test_classes_that_share_no_batches_have_their_shares_of_a_device_that_is_interrupted() -> None:
    costs, given_s = TaskCosts(), Counter[str]()
    for items in range(1, 40):
        costs.ran("task", items, 0.1 * items)
    scheduler: Scheduler[None] = Scheduler(SHARES, costs)
    keys = {lane: BatchKey("task", lane.priority_class) for lane in (HIGH, NORMAL, LOW)}
    for lane, key in keys.items():
        for number in range(3000):
            scheduler.admit(Job(str(number), key, Limits(10), 1, 0.0, None, lane))
    held: list[Batch[None]] = []
    for _ in range(500):
        # As a device does: what is urgent first, then the batches in turn, one behind the other.
        batch = scheduler.urgent_batch(held, 0.0) if held else None
        if batch is None and len(held) < 2:
            batch = scheduler.next_batch(len(held), False, 0.0)
            if batch is not None:
                held.append(batch)
                continue
        if batch is None:
            batch = held.pop(0)
        given_s[batch.jobs[0].lane.priority_class] += batch.items
        scheduler.ended(batch, 0.1 * batch.items)
    for name, share in SHARES.items():
        assert given_s[name] / sum(given_s.values()) == pytest.approx(share / 100, abs=0.03)


def test_few_live_jobs_are_not_put_into_a_long_batch_of_bulk() -> None:
    scheduler, running = urgent_scene(25)
    scheduler.ended(running, 10.0)
    live(scheduler, "live")
    # A batch of ten takes ten passes of one; more would be worth a pass of its own.
    first = scheduler.next_batch(0, False, 0.0)
    assert "live" in names_of(first)
    long, _ = urgent_scene(0)
    for number in range(100):
        long.admit(Job(str(number), EMBED, Limits(40), 1, 0.0, None, LOW))
    long.admit(Job("live", EMBED, Limits(40), 1, 0.0, None, HIGH))
    sizes = [names_of(long.next_batch(0, False, 0.0)) for _ in range(2)]
    assert ["live"] in sizes
    assert {len(each) for each in sizes} == {1, 40}


def test_a_batch_goes_before_others_only_if_that_saves_more_than_it_costs() -> None:
    scheduler, running = urgent_scene(10)
    live(scheduler, "live")
    # A pass of one item takes a second, and nothing else waits.
    assert scheduler.urgent_batch([running], 0.0, left_s=9.0) is None
    assert names_of(scheduler.urgent_batch([running], 0.0, left_s=20.0)) == ["live"]


def test_the_same_class_and_a_batch_with_jobs_of_it_are_not_interrupted() -> None:
    scheduler, running = urgent_scene()
    live(scheduler, "same", lane=LOW)
    assert scheduler.urgent_batch([running], 0.0) is None
    live(scheduler, "live")
    mixed = scheduler.next_batch(0, False, 0.0)
    assert "live" in names_of(mixed)
    assert mixed is not None
    live(scheduler, "next")
    assert scheduler.urgent_batch([running, mixed], 0.0) is None


def test_a_suspect_is_never_interrupted() -> None:
    scheduler, running = urgent_scene()
    live(scheduler, "live")
    assert scheduler.urgent_batch([Batch(running.jobs, alone=True)], 0.0) is None
    scheduler.quarantine(Job("suspect", EMBED, Limits(10), 1, 0.0, None, LOW))
    assert scheduler.urgent_batch([running], 0.0) is None


def test_urgent_jobs_wait_although_others_of_their_key_would_fill_a_batch() -> None:
    scheduler, running = urgent_scene()
    for number in range(10):
        scheduler.admit(Job(f"bulk-{number}", LABEL, Limits(10, 0.5), 1, 1.0, None, LOW))
    scheduler.admit(Job("live", LABEL, Limits(10, 0.5), 1, 1.0, None, HIGH))
    assert scheduler.urgent_batch([running], 1.4) is None
    assert names_of(scheduler.urgent_batch([running], 1.5)) == ["live"]


def test_who_has_used_up_its_share_is_not_urgent_any_more() -> None:
    scheduler, running = urgent_scene()
    given = 0
    # Ten items of low, with a share of 20, are worth 25 of high, with a share of 50.
    for _ in range(20):
        live(scheduler, *map(str, range(5)))
        batch = scheduler.urgent_batch([running], 0.0)
        if batch is None:
            break
        scheduler.ended(batch, 5.0)
        given += batch.items
    assert 20 <= given <= 30


def test_batch_of_which_nothing_is_known_is_worth_a_pass_of_its_own() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    scheduler.admit(Job("bulk", EMBED, Limits(10), 1, 0.0, None, LOW))
    running = scheduler.next_batch(0, False, 0.0)
    assert running is not None
    live(scheduler, "live")
    assert names_of(scheduler.urgent_batch([running], 0.0, left_s=0.0)) == ["live"]


def test_only_jobs_of_the_higher_class_count_as_what_is_saved() -> None:
    scheduler, running = urgent_scene(10)
    live(scheduler, "live")
    live(scheduler, *map(str, range(8)), lane=LOW)
    # A pass of one second saves the time of the device, and that of a batch with all nine.
    assert scheduler.urgent_batch([running], 0.0, left_s=0.5) is None
    assert names_of(scheduler.urgent_batch([running], 0.0, left_s=6.0)) == ["live"]


def test_device_that_waits_for_nothing_is_asked_for_nothing() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    assert not scheduler.holds_any
    assert not scheduler.has_suspects
    assert scheduler.urgent_batch([], 0.0) is None
    for admit in (scheduler.quarantine, scheduler.admit):
        held: Scheduler[None] = Scheduler(SHARES)
        getattr(held, admit.__name__)(Job("a", EMBED, Limits(10), 1, 0.0, None, LOW))
        assert held.holds_any
        assert held.has_suspects == (admit != scheduler.admit)


def test_job_that_is_in_time_in_an_urgent_batch_is_not_given_up_for_the_bulk_beside_it() -> None:
    scheduler, running = urgent_scene(sheds_late=True)
    # A full batch of bulk takes ten seconds, and the job alone one.
    scheduler.admit(Job("live", EMBED, Limits(10), 1, 0.0, None, HIGH, deadline_s=5.0))
    assert names_of(scheduler.urgent_batch([running], 0.0, 20.0)) == ["live"]
    assert scheduler.take_late(0.0) == []


def test_job_that_has_its_turn_after_the_bulk_is_not_given_up_with_the_batch_of_the_bulk() -> None:
    scheduler, _ = urgent_scene(0, sheds_late=True)
    for number in range(20):
        scheduler.admit(Job(str(number), EMBED, Limits(20), 1, 0.0, None, LOW))
    # It owes as much as the bulk, which came first.
    scheduler.admit(Job("live", EMBED, Limits(20), 1, 0.0, None, HIGH, deadline_s=5.0))
    running = scheduler.next_batch(0, False, 0.0) or Batch(())
    assert len(running.jobs) == 20
    assert scheduler.take_late(0.0) == []
    assert names_of(scheduler.urgent_batch([running], 0.0, 20.0)) == ["live"]


def test_jobs_of_thousands_of_keys_may_be_too_late_at_once() -> None:
    scheduler, _ = urgent_scene(0, sheds_late=True)
    for number in range(2400):
        key = BatchKey(EMBED.task, str(number % 1200))
        scheduler.admit(Job(str(number), key, Limits(10), 1, 0.0, None, deadline_s=1.5))
    # A job takes a second, and the two of a key two.
    assert scheduler.next_batch(0, False, 0.0) is None
    assert len(scheduler.take_late(0.0)) == 2400
