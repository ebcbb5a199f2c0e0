"""The scheduler under arbitrary arrivals, simulated: time is an argument, nothing sleeps."""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import DEVICE_DEPTH, Batch, BatchKey, Job, Lane, Limits

KEYS = [BatchKey("shout"), BatchKey("shout", '{"tag":"x"}'), BatchKey("embed", "", (1.0, None))]


LANES = [Lane("high"), Lane("low", "a"), Lane("low", "b")]

SHARES = {"high": 3.0, "low": 1.0}

#: Maximum items of a job in the state machine.
MAX_ITEMS = 7

#: Maximum number of batches of other keys before a due key's own. Its tag is at most a batch ahead,
#: with the weight of one flow of many; the others catch up, an item at a time.
MAX_OVERTAKEN = MAX_ITEMS * len(KEYS) * len(LANES) * 4


def job(
    number: int,
    key: BatchKey = KEYS[0],
    *,
    items: int = 1,
    arrived_s: float = 0.0,
    max_batch_size: int = 4,
    max_wait_s: float = 0.0,
) -> Job[None]:
    return Job(str(number), key, Limits(max_batch_size, max_wait_s), items, arrived_s, None)


def admitted(*jobs: Job[None]) -> Scheduler[None]:
    scheduler: Scheduler[None] = Scheduler()
    for each in jobs:
        scheduler.admit(each)
    return scheduler


def ids(batch: Batch[Any] | None) -> list[str]:
    return [each.id for each in batch.jobs] if batch is not None else []


def test_a_key_that_was_passed_over_goes_next_though_it_is_not_full() -> None:
    scheduler = admitted(job(0, KEYS[1]), *(job(number) for number in range(1, 9)))
    assert ids(scheduler.next_batch(1, False, 0.0)) == ["1", "2", "3", "4"]
    assert ids(scheduler.next_batch(1, False, 0.0)) == ["0"]
    assert ids(scheduler.next_batch(1, False, 0.0)) == ["5", "6", "7", "8"]


def test_a_key_that_still_waits_to_grow_is_not_passed_over() -> None:
    patient = job(0, KEYS[1], max_wait_s=60)
    scheduler = admitted(patient, *(job(number) for number in range(1, 5)))
    assert ids(scheduler.next_batch(1, False, 0.0)) == ["1", "2", "3", "4"]
    assert scheduler.next_batch(1, False, 61.0) is None


def test_of_keys_that_are_equal_the_one_that_came_first_goes_first() -> None:
    scheduler = admitted(job(0, KEYS[1]), job(1))
    assert ids(scheduler.next_batch(0, False, 0.0)) == ["0"]
    assert ids(scheduler.next_batch(0, False, 0.0)) == ["1"]


def test_a_key_behind_an_equal_one_is_not_passed_over() -> None:
    scheduler = admitted(*(job(number) for number in range(4)), job(4, KEYS[1]))
    assert ids(scheduler.next_batch(1, False, 0.0)) == ["0", "1", "2", "3"]
    assert scheduler.next_batch(1, False, 0.0) is None


def recovered(number: int) -> Job[None]:
    return replace(job(number), recovered=True)


def test_job_recovered_from_dead_worker_runs_alone_on_an_empty_device() -> None:
    scheduler = admitted(job(1), job(2))
    scheduler.quarantine(recovered(8))
    assert len(scheduler) == 3
    assert scheduler.next_batch(1, False, 0.0) is None
    batch = scheduler.next_batch(0, False, 0.0)
    assert (ids(batch), batch and batch.alone) == (["8"], True)
    assert ids(scheduler.next_batch(0, False, 0.0)) == ["1", "2"]


def test_jobs_recovered_from_dead_worker_run_in_halves_of_their_batch() -> None:
    scheduler = admitted(job(1))
    for number in range(2, 7):
        scheduler.quarantine(replace(recovered(number), among=2))
    scheduler.quarantine(recovered(7))
    batches = [scheduler.next_batch(0, False, 0.0) for _ in range(5)]
    assert [ids(batch) for batch in batches] == [["2", "3"], ["4", "5"], ["6"], ["7"], ["1"]]
    assert [batch.alone for batch in batches if batch] == [False, False, True, True, False]


def test_halves_share_key_and_maximum_size() -> None:
    scheduler: Scheduler[None] = Scheduler()
    for each in (job(1), job(2, KEYS[1]), job(3, KEYS[1], items=4), job(4, KEYS[1], items=1)):
        scheduler.quarantine(replace(each, recovered=True, among=4))
    batches = [scheduler.next_batch(0, False, 0.0) for _ in range(3)]
    assert [ids(batch) for batch in batches] == [["1"], ["2"], ["3"]]


def test_suspects_share_slots_with_their_cohort_alone() -> None:
    scheduler: Scheduler[None] = Scheduler(in_slots=True)
    scheduler.admit(job(1, KEYS[2]))
    for number in (2, 3, 4):
        scheduler.quarantine(replace(job(number, KEYS[2]), among=2))
    first = scheduler.next_batch(0, False, 0.0)
    assert (ids(first), first and first.cohort) == (["2"], 2)
    assert ids(scheduler.next_batch(1, False, 0.0, cohort=2)) == ["3"]
    assert scheduler.next_batch(2, False, 0.0, cohort=2) is None
    assert ids(scheduler.next_batch(0, False, 0.0)) == ["4"]
    assert scheduler.next_batch(1, False, 0.0, cohort=2) is None
    assert ids(scheduler.next_batch(0, False, 0.0)) == ["1"]


def test_clear_drops_all_that_waits() -> None:
    scheduler = admitted(job(1))
    scheduler.quarantine(recovered(2))
    assert [each.id for each in scheduler.clear()] == ["2", "1"]
    assert not scheduler.holds_any


def test_jobs_that_went_to_another_worker_are_forgotten() -> None:
    waiting = [job(1, arrived_s=2.0), job(2), job(3, key=KEYS[1]), job(2)]
    scheduler = admitted(*waiting)
    scheduler.quarantine(suspect := job(9))
    scheduler.quarantine(recovered(8))
    assert scheduler.has_suspects
    assert sorted(each.id for each in scheduler.held()) == ["1", "2", "2", "3"]
    assert scheduler.oldest_held_s() == 0.0
    # Two messages with one id are two jobs.
    scheduler.remove([waiting[1], waiting[2]])
    assert [each.id for each in scheduler.held()] == ["1", "2"]
    assert len(scheduler) == 4
    scheduler.remove([suspect])
    assert [each.id for each in scheduler] == ["8", "1", "2"]
    scheduler.remove([waiting[0], waiting[3]])
    assert scheduler.oldest_held_s() is None
    assert len(scheduler) == 1


# Everything that must hold for arbitrary arrivals


@dataclass
class DeviceModel:
    """Batches that a simulated device holds."""

    batches: list[Batch[None]] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        return any(batch.alone for batch in self.batches)


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs arrive, devices ask, finish and die, time passes, in any order.

    Once the oldest job of a key is due, a bounded number of batches is formed before its own,
    whichever device asks. How fair the shares are is measured in `test_shares.py`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[None] = Scheduler(SHARES)
        self.now_s = 0.0
        self.numbers = itertools.count()
        self.waiting: dict[BatchKey, list[Job[None]]] = {}
        self.suspects: list[Job[None]] = []
        self.overtaken: dict[BatchKey, int] = defaultdict(int)
        self.devices: list[DeviceModel] = []
        self.done: list[str] = []
        self.limits: dict[BatchKey, Limits] = {}

    @initialize(
        devices=st.integers(1, 3),
        sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
        waits=st.lists(st.sampled_from([0.0, 0.0, 1.0, 5.0]), min_size=3, max_size=3),
    )
    def configure(self, devices: int, sizes: list[int], waits: list[float]) -> None:
        self.devices = [DeviceModel() for _ in range(devices)]
        self.limits = {
            key: Limits(size, wait) for key, size, wait in zip(KEYS, sizes, waits, strict=True)
        }

    @rule(
        key=st.sampled_from(KEYS),
        lane=st.sampled_from(LANES),
        sizes=st.lists(st.integers(1, MAX_ITEMS), min_size=1, max_size=6),
    )
    def arrive(self, key: BatchKey, lane: Lane, sizes: list[int]) -> None:
        for items in sizes:
            number = str(next(self.numbers))
            arrived = Job(number, key, self.limits[key], items, self.now_s, None, lane)
            self.scheduler.admit(arrived)
            self.waiting.setdefault(key, []).append(arrived)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(number=st.integers(0, 2))
    def ask(self, number: int) -> None:
        device = self.devices[number % len(self.devices)]
        before = {key: list(jobs) for key, jobs in self.waiting.items() if jobs}
        batch = self.scheduler.next_batch(len(device.batches), device.alone, self.now_s)
        if batch is None:
            self.check_nothing_was_due(device, before)
            return
        assert not device.alone
        assert len(device.batches) < DEVICE_DEPTH
        if batch.alone:
            assert not device.batches
            assert list(batch.jobs) == [self.suspects.pop(0)]
        else:
            assert not self.suspects
            self.check_batch(batch, device, before)
        device.batches.append(batch)

    def check_nothing_was_due(
        self, device: DeviceModel, before: dict[BatchKey, list[Job[None]]]
    ) -> None:
        if device.alone or len(device.batches) == DEVICE_DEPTH:
            return
        if device.batches:
            full = [key for key, jobs in before.items() if self.is_full(key, jobs)]
            assert self.suspects or not full
            return
        assert not self.suspects
        for key, jobs in before.items():
            assert not self.is_full(key, jobs)
            assert self.now_s < jobs[0].arrived_s + self.limits[key].max_wait_s
        wake_s = self.scheduler.wake_s()
        oldest = [jobs[0].arrived_s + self.limits[key].max_wait_s for key, jobs in before.items()]
        assert wake_s == min(oldest, default=None)
        assert wake_s is None or wake_s > self.now_s

    def check_batch(
        self,
        batch: Batch[None],
        device: DeviceModel,
        before: dict[BatchKey, list[Job[None]]],
    ) -> None:
        (key,) = {each.key for each in batch.jobs}
        limits = self.limits[key]
        jobs = before[key]
        assert batch.items <= limits.max_batch_size or len(batch.jobs) == 1
        # First come, first served in each lane; and as many as fit.
        gone = set(ids(batch))
        left = [each for each in jobs if each.id not in gone]
        for lane in LANES:
            taken = [each for each in batch.jobs if each.lane == lane]
            assert taken == [each for each in jobs if each.lane == lane][: len(taken)]
        assert not left or batch.items + max(each.items for each in left) > limits.max_batch_size
        due = self.now_s >= jobs[0].arrived_s + limits.max_wait_s
        assert self.is_full(key, jobs) or due
        if device.batches and not self.is_full(key, jobs):
            assert self.overtaken[key] > 0
        for other, waiting in before.items():
            if other != key and self.now_s >= (
                waiting[0].arrived_s + self.limits[other].max_wait_s
            ):
                self.overtaken[other] += 1
                assert self.overtaken[other] <= MAX_OVERTAKEN
        self.overtaken[key] = 0
        self.waiting[key] = left

    def is_full(self, key: BatchKey, jobs: list[Job[None]]) -> bool:
        return sum(each.items for each in jobs) >= self.limits[key].max_batch_size

    @rule(number=st.integers(0, 2))
    def finish(self, number: int) -> None:
        device = self.devices[number % len(self.devices)]
        if device.batches:
            batch = device.batches.pop(0)
            self.scheduler.ended(batch, run_s=0.001 * batch.items)
            self.done += ids(batch)

    @rule(number=st.integers(0, 2))
    def die(self, number: int) -> None:
        device = self.devices[number % len(self.devices)]
        for batch in device.batches:
            self.scheduler.ended(batch, run_s=None)
            for each in batch.jobs:
                suspect = replace(each, deaths=each.deaths + batch.alone)
                self.scheduler.quarantine(suspect)
                self.suspects.append(suspect)
        device.batches.clear()

    @rule()
    def reconnect(self) -> None:
        dropped = [each.id for each in self.scheduler.clear()]
        waiting = [each.id for jobs in self.waiting.values() for each in jobs]
        assert sorted(dropped) == sorted([*waiting, *(each.id for each in self.suspects)])
        self.waiting.clear()
        self.suspects.clear()
        self.overtaken.clear()
        self.done += dropped

    @invariant()
    def every_job_is_in_exactly_one_place(self) -> None:
        batches = [batch for device in self.devices for batch in device.batches]
        flying = [each for batch in batches for each in ids(batch)]
        waiting = [each.id for each in self.scheduler]
        everywhere = sorted(map(int, [*flying, *waiting, *self.done]))
        assert everywhere == list(range(len(everywhere)))
        assert len(self.scheduler) == len(waiting)


TestSchedulerMachine = SchedulerMachine.TestCase


Arrivals = st.lists(
    st.tuples(
        st.floats(0, 5, allow_subnormal=False),
        st.sampled_from(range(len(KEYS))),
        st.integers(1, 6),
    ),
    max_size=60,
)


@given(
    arrivals=Arrivals,
    service_s=st.lists(st.sampled_from([0.05, 0.3, 1.0, 3.0]), min_size=1, max_size=3),
    max_wait_s=st.sampled_from([0.0, 0.2, 2.0]),
    max_batch_size=st.integers(1, 8),
)
def test_simulated_devices_run_every_job_once_and_in_bounded_time(
    arrivals: list[tuple[float, int, int]],
    service_s: list[float],
    max_wait_s: float,
    max_batch_size: int,
) -> None:
    served = simulate(arrivals, service_s, max_wait_s, max_batch_size)
    assert sorted(served) == list(range(len(arrivals)))
    # A job leaves at the latest after its own wait, everything that came before or beside it, and
    # what ran already: work is conserved, so no more than the sum of all batches.
    slowest_s = max(service_s)
    for number, started_s in served.items():
        arrived_s = arrivals[number][0]
        assert started_s >= arrived_s
        assert (
            started_s <= arrived_s + max_wait_s + slowest_s * (len(arrivals) + DEVICE_DEPTH) + 1e-6
        )


def simulate(
    arrivals: list[tuple[float, int, int]],
    service_s: list[float],
    max_wait_s: float,
    max_batch_size: int,
) -> dict[int, float]:
    """Runs devices with these service times to the end; returns when each job was dispatched.

    Devices ask at arrivals, at ends of batches and at `wake_s`, as the dispatcher does, and at no
    other time: a scheduler that named a wrong one would leave jobs behind.
    """
    scheduler: Scheduler[None] = Scheduler()
    events: list[tuple[float, int, str, int]] = []
    order = itertools.count()
    for number, (at_s, _, _) in enumerate(arrivals):
        heapq.heappush(events, (at_s, next(order), "arrival", number))
    in_flight = [0] * len(service_s)
    free_s = [0.0] * len(service_s)
    served: dict[int, float] = {}
    while events:
        now_s, _, kind, number = heapq.heappop(events)
        if kind == "arrival":
            _, key, items = arrivals[number]
            scheduler.admit(
                job(
                    number,
                    KEYS[key],
                    items=items,
                    arrived_s=now_s,
                    max_batch_size=max_batch_size,
                    max_wait_s=max_wait_s,
                )
            )
        elif kind == "end":
            in_flight[number] -= 1
        for device in sorted(range(len(service_s)), key=in_flight.__getitem__):
            while (batch := scheduler.next_batch(in_flight[device], False, now_s)) is not None:
                for each in batch.jobs:
                    assert int(each.id) not in served
                    served[int(each.id)] = now_s
                in_flight[device] += 1
                free_s[device] = max(now_s, free_s[device]) + service_s[device]
                heapq.heappush(events, (free_s[device], next(order), "end", device))
        wake_s = scheduler.wake_s()
        if wake_s is not None and 0 in in_flight:
            assert wake_s > now_s, "an idle device was left with a job that is due"
            heapq.heappush(events, (wake_s, next(order), "wake", 0))
    return served


# Deadlines, small calls, what is said of those that wait


def dated(name: str, deadline_s: float, arrived_s: float = 0.0, items: int = 1) -> Job[None]:
    return Job(name, BatchKey("a"), Limits(4), items, arrived_s, None, deadline_s=deadline_s)


def late(scheduler: Scheduler[None], now_s: float) -> list[str]:
    return [each.id for each in scheduler.take_late(now_s)]


def shedding() -> Scheduler[None]:
    """A scheduler that knows that each item takes 0.1 s, and gives up late jobs."""
    costs = TaskCosts()
    for number in range(100):
        costs.ran("a", 1 + number % 4, 0.1 * (1 + number % 4))
    return Scheduler(costs=costs, sheds_late=True)


def test_jobs_are_not_given_up_unless_somebody_wants_that() -> None:
    scheduler = admitted(dated("a", 1.0))
    assert scheduler.late_s() is None
    assert late(scheduler, 9.0) == []
    assert ids(scheduler.next_batch(0, False, 9.0)) == ["a"]


def test_without_known_costs_a_job_is_late_when_its_deadline_is_over() -> None:
    scheduler: Scheduler[None] = Scheduler(sheds_late=True)
    for each in (dated("a", 1.0), dated("b", 2.0), dated("far", 500.0), dated("c", inf)):
        scheduler.admit(each)
    assert scheduler.late_s() == 1.0
    assert late(scheduler, 1.0) == []
    assert late(scheduler, 1.1) == ["a"]
    assert len(scheduler) == 3
    assert scheduler.late_s() == 2.0
    assert late(scheduler, 5.0) == ["b"]
    assert late(scheduler, 501.0) == ["far"]
    assert scheduler.late_s() is None
    assert ids(scheduler.next_batch(0, False, 501.0)) == ["c"]


def test_a_job_is_late_when_it_would_be_too_late_even_alone() -> None:
    scheduler = shedding()
    scheduler.admit(dated("small", 1.0, items=1))
    scheduler.admit(dated("large", 1.0, items=4))
    assert late(scheduler, 0.5) == []
    assert late(scheduler, 0.7) == ["large"]
    assert late(scheduler, 0.95) == ["small"]
    assert not len(scheduler)


def test_small_calls_overtake_large_ones_and_cannot_starve_them() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    large, small = Lane("high", is_large=True), Lane("high")
    for number in range(6):
        scheduler.admit(Job(f"large {number}", BatchKey("a"), Limits(8), 8, 0.0, None, large))
    order = []
    for number in range(40):
        scheduler.admit(Job(f"small {number}", BatchKey("a"), Limits(8), 1, 0.0, None, small))
        if number % 2:
            batch = scheduler.next_batch(0, False, 0.0)
            assert batch is not None
            scheduler.ended(batch, 0.01 * batch.items)
            order.append(ids(batch)[0].split()[0])
    # The first batch has both; from then on each kind has half of the time.
    assert "small" in order[:2]
    assert order.count("large") >= 4
    assert order.count("small") >= 10


def test_jobs_that_the_next_batch_would_answer_too_late_are_given_up_for_others() -> None:
    scheduler = shedding()
    for number in range(4):
        scheduler.admit(dated(f"early {number}", 0.35))
    for number in range(4):
        scheduler.admit(dated(f"late {number}", 0.45))
    # A batch of four takes 0.4 s.
    assert ids(scheduler.next_batch(0, False, 0.0)) == [f"late {number}" for number in range(4)]
    assert sorted(late(scheduler, 0.0)) == [f"early {number}" for number in range(4)]
    assert not len(scheduler)


def test_time_that_a_device_is_busy_counts_for_the_batch_behind() -> None:
    scheduler = shedding()
    for number in range(4):
        scheduler.admit(dated(str(number), 0.6))
    assert scheduler.next_batch(1, False, 0.0, left_s=0.3) is None
    assert len(late(scheduler, 0.0)) == 4


def test_items_that_could_share_a_batch_are_counted_by_class() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    for number, (key, lane) in enumerate(
        [(0, 0), (0, 1), (0, 2), (1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 1), (2, 1)]
    ):
        scheduler.admit(replace(job(number, KEYS[key]), lane=LANES[lane]))
    assert scheduler.count_items("shout", "low") == 3
    assert scheduler.count_items("shout", "high") == 1
    assert scheduler.count_items("embed", "low") == 4
    assert scheduler.count_items("embed", "high") == scheduler.count_items("unknown", "low") == 0


def test_a_higher_class_may_go_before_batches_that_no_suspect_is_in() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    scheduler.admit(low := replace(job(1), lane=LANES[1]))
    batch = scheduler.next_batch(0, alone=False, now_s=0.0)
    assert batch is not None
    assert scheduler.goes_before("high", [batch])
    assert not scheduler.goes_before("low", [batch])
    assert not scheduler.goes_before("high", [])
    assert not scheduler.goes_before("high", [batch, Batch((low,), alone=True)])
