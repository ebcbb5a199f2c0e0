"""The event loop in virtual time, with the real scheduler."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.job import Lane, Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime, Simulation
from batchery_worker.simulator.outcome import SimulatedRun
from batchery_worker.simulator.policies import RealScheduler, SimulatedBatch, SimulatedJob
from batchery_worker.simulator.workload import (
    TASK,
    Arrival,
    JobKind,
    arrivals,
    poisson_times,
    steady_times,
    together,
)

SHARES = {"high": 50.0, "normal": 30.0, "low": 20.0}
HIGH, NORMAL, LOW = (Lane(name) for name in SHARES)


class Watched(RealScheduler):
    """The real scheduler, whose answers are remembered."""

    def __init__(self) -> None:
        super().__init__(SHARES)
        #: Ids of jobs as they leave, and as they are back.
        self.sent: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.died: Counter[str] = Counter()
        self.sizes: list[int] = []

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
        **options: Any,
    ) -> SimulatedBatch | None:
        return self._noted(
            super().next_batch(in_flight, alone, now_s, elsewhere, behind, left_s, **options)
        )

    def urgent_batch(
        self,
        behind: Sequence[SimulatedBatch],
        now_s: float,
        left_s: float = math.inf,
        **options: Any,
    ) -> SimulatedBatch | None:
        return self._noted(super().urgent_batch(behind, now_s, left_s, **options))

    def _noted(self, batch: SimulatedBatch | None) -> SimulatedBatch | None:
        if batch:
            self.sent.update(job.id for job in batch.jobs)
            self.sizes.append(batch.items)
        return batch

    def ended(self, batch: SimulatedBatch, run_s: float | None, load_s: float = 0.0) -> None:
        super().ended(batch, run_s, load_s)
        (self.died if run_s is None else self.done).update(job.id for job in batch.jobs)


def run(
    stream: Sequence[Arrival] | Iterator[Arrival],
    fleet: Fleet | None = None,
    limits: Limits = Limits(8),  # noqa: B008 (frozen)
    policy: RealScheduler | None = None,
) -> SimulatedRun:
    policy = RealScheduler(SHARES) if policy is None else policy
    return Simulation(policy, fleet or Fleet(), limits).run(stream)


def latencies_ms(outcome: SimulatedRun) -> list[float]:
    return [round(1000 * each, 6) for lane in outcome.lanes.values() for each in lane.latencies_s]


def test_a_lone_job_takes_what_a_batch_of_one_takes() -> None:
    outcome = run([Arrival(1.0, "task", HIGH)])
    assert latencies_ms(outcome) == [10.5]
    assert outcome.end_s == pytest.approx(1.0105)


def test_each_batch_that_is_back_is_told() -> None:
    told: list[tuple[int, float]] = []
    stream = [Arrival(0.0, "task", HIGH), Arrival(0.004, "task", HIGH, 3)]
    Simulation(
        RealScheduler(SHARES),
        Fleet(),
        Limits(8),
        on_done=lambda batch, began_s, end_s: told.append((batch.items, round(end_s - began_s, 6))),
    ).run(stream)
    assert told == [(1, 0.0105), (3, 0.0115)]


def test_jobs_that_come_at_the_same_time_are_one_batch() -> None:
    outcome = run([Arrival(0.0, "task", HIGH)] * 4)
    assert latencies_ms(outcome) == [12.0] * 4
    assert (outcome.batches, outcome.batch_items) == (1, 4.0)


def test_a_job_that_comes_meanwhile_waits_for_the_device() -> None:
    outcome = run([Arrival(0.0, "task", HIGH), Arrival(0.004, "task", HIGH)])
    assert latencies_ms(outcome) == [10.5, 17.0]


def test_max_wait_lets_a_batch_grow_on_an_idle_device() -> None:
    stream = [Arrival(0.0, "task", HIGH), Arrival(0.004, "task", HIGH)]
    outcome = run(stream, limits=Limits(8, max_wait_s=0.005))
    assert latencies_ms(outcome) == [16.0, 12.0]


def test_a_busy_device_gets_a_full_batch_and_no_other() -> None:
    policy = Watched()
    times_s = (0.0, *[0.001] * 8, *[0.002] * 3)
    run([Arrival(time_s, "task", HIGH) for time_s in times_s], policy=policy)
    assert policy.sizes == [1, 8, 3]


def test_second_batch_behind_a_long_one_leaves_late() -> None:
    """The first three long batches teach how long they take; then a batch can still grow."""
    policy = Watched()
    fleet = Fleet(1, ServiceTime(pass_ms=1000.0, item_ms=0.0))
    times_s = [0.0, 1.5, 3.0, 3.1, 3.1, 3.8]
    stream = [Arrival(each, "task", HIGH, items=4) for each in times_s]
    run(stream, fleet, Limits(12), policy)
    assert policy.sizes == [4, 4, 4, 12]


def test_micro_batches_take_a_pass_each_and_tokens_cost() -> None:
    service = ServiceTime(pass_ms=10.0, item_ms=1.0, token_ms=0.5, micro_batch_size=4)
    outcome = run([Arrival(0.0, "task", HIGH, items=6, tokens=8)], Fleet(1, service))
    assert latencies_ms(outcome) == [2 * 10.0 + 6.0 + 4.0]


def test_a_second_batch_is_prepared_while_the_first_one_runs() -> None:
    fleet = Fleet(1, ServiceTime(pass_ms=10.0, item_ms=0.0, prepare_ms=4.0))
    times_s = (0.0, *[0.001] * 8, *[0.012] * 3)
    outcome = run([Arrival(time_s, "task", HIGH) for time_s in times_s], fleet)
    # The last three leave when the device is idle, at 24 ms, and run from 28 ms on.
    assert latencies_ms(outcome) == [14.0, *[23.0] * 8, *[26.0] * 3]
    assert outcome.busy_s == pytest.approx(0.030)


def test_the_way_to_the_worker_counts_for_latencies_and_deadlines_alone() -> None:
    fleet = Fleet(1, ServiceTime(pass_ms=10.0, item_ms=0.0, overhead_ms=3.0))
    times_s = (0.0, 0.010)
    outcome = run([Arrival(each, "task", HIGH, deadline_s=0.012) for each in times_s], fleet)
    assert latencies_ms(outcome) == [13.0, 13.0]
    assert outcome.end_s == pytest.approx(0.020)
    assert outcome.lanes[HIGH].late == 2


def test_a_job_whose_deadline_is_over_when_the_worker_has_it_is_given_up() -> None:
    fleet = Fleet(1, ServiceTime(overhead_ms=3.0))
    stream = [Arrival(0.0, "task", HIGH, deadline_s=each) for each in (0.002, 1.0)]
    policy = RealScheduler(SHARES, sheds_late=True)
    outcome = Simulation(policy, fleet, Limits(8)).run(stream)
    assert (outcome.lanes[HIGH].shed, outcome.done) == (1, 1)


def test_an_urgent_batch_goes_between_the_passes_of_another_one() -> None:
    """Passes of 12 ms each; the job comes during the first one."""
    fleet = Fleet(1, ServiceTime(micro_batch_size=4))
    stream = [*[Arrival(0.0, "task", LOW)] * 12, Arrival(0.005, "task", HIGH)]
    outcome = run(stream, fleet, Limits(12))
    assert latencies_ms(outcome) == [*[46.5] * 12, 17.5]
    assert outcome.busy_s == pytest.approx(0.0465 + 0.0105 - 0.0105)


def test_an_urgent_batch_goes_before_the_second_one_of_a_device() -> None:
    policy = Watched()
    stream = [*[Arrival(0.0, "task", LOW)] * 16, Arrival(0.005, "task", HIGH)]
    outcome = run(stream, policy=policy)
    assert policy.sizes == [8, 8, 1]
    assert latencies_ms(outcome) == [*[14.0] * 8, *[38.5] * 8, 19.5]


def test_a_slow_device_takes_longer() -> None:
    outcome = run([Arrival(0.0, "task", HIGH)], Fleet(1, slowness={0: 3.0}))
    assert latencies_ms(outcome) == [31.5]


def test_noise_changes_times_and_not_their_mean() -> None:
    stream = [Arrival(0.1 * number, "task", HIGH) for number in range(3000)]
    found = latencies_ms(run(stream, Fleet(1, ServiceTime(noise=0.3))))
    assert len(set(found)) == 3000
    assert sum(found) / 3000 == pytest.approx(10.5, rel=0.03)


def test_jobs_on_a_device_that_dies_run_again_alone_on_another() -> None:
    policy = Watched()
    stream = [Arrival(0.0, "task", HIGH)] * 3
    outcome = run(stream, Fleet(2, deaths_s={0: 0.005}), policy=policy)
    assert policy.sizes == [3, 1, 1, 1]
    assert (outcome.rerun, outcome.done) == (3, 3)
    assert outcome.alive_s == pytest.approx(outcome.end_s + 0.005)


def test_jobs_are_left_where_every_device_is_dead() -> None:
    outcome = run([Arrival(0.0, "task", HIGH)] * 3, Fleet(1, deaths_s={0: 0.005}))
    assert (outcome.done, outcome.lanes[HIGH].left, outcome.batches) == (0, 3, 0)


def test_arrivals_that_go_back_in_time_are_refused() -> None:
    with pytest.raises(ValueError, match=r"an arrival at 1 s comes after 2 s"):
        run([Arrival(2.0, "task", HIGH), Arrival(1.0, "task", HIGH)])


#: Batches that a job may wait for beside a flood; what is measured is up to 9.
MAX_WAIT_BATCHES = 10

#: Pauses between jobs, in milliseconds: many at once, or far apart.
PAUSES_MS = st.one_of(st.just(0.0), st.floats(0.0, 5.0), st.floats(0.0, 200.0))

JOBS = st.lists(
    st.tuples(
        PAUSES_MS,
        st.sampled_from(["embed", "label"]),
        st.sampled_from([HIGH, NORMAL, LOW, Lane("low", "bulk")]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=120,
)


def stream_of(jobs: Sequence[tuple[float, str, Lane, int]]) -> list[Arrival]:
    times_ms = itertools.accumulate(pause_ms for pause_ms, *_ in jobs)
    return [
        Arrival(time_ms / 1000, task, lane, items)
        for time_ms, (_, task, lane, items) in zip(times_ms, jobs, strict=True)
    ]


@settings(deadline=None)
@given(
    jobs=JOBS,
    deaths_ms=st.lists(st.floats(1.0, 400.0), max_size=3),
    slowness=st.floats(1.0, 5.0),
    max_wait_ms=st.sampled_from([0.0, 3.0, 50.0]),
)
def test_no_job_is_lost_or_done_twice_even_where_devices_die(
    jobs: list[tuple[float, str, Lane, int]],
    deaths_ms: list[float],
    slowness: float,
    max_wait_ms: float,
) -> None:
    policy = Watched()
    deaths_s = {number: each / 1000 for number, each in enumerate(deaths_ms)}
    fleet = Fleet(len(deaths_ms) + 1, slowness={0: slowness}, deaths_s=deaths_s)
    outcome = run(stream_of(jobs), fleet, Limits(8, max_wait_ms / 1000), policy)
    assert policy.done == Counter(str(number + 1) for number in range(len(jobs)))
    assert policy.sent == policy.done + policy.died
    assert outcome.done == len(jobs)
    assert outcome.items == sum(items for *_, items in jobs)
    assert outcome.rerun == policy.died.total()
    assert len(policy) == 0


class Conserving(Watched):
    """Fails when a device that asks while it is idle gets nothing although a job waits."""

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
        **options: Any,
    ) -> SimulatedBatch | None:
        batch = super().next_batch(in_flight, alone, now_s, elsewhere, behind, left_s, **options)
        assert batch or in_flight or not len(self)
        return batch


@settings(deadline=None)
@given(jobs=JOBS, devices=st.integers(1, 4))
def test_no_device_is_idle_while_a_job_waits(
    jobs: list[tuple[float, str, Lane, int]], devices: int
) -> None:
    """And so the time in which jobs are there is the time in which a device works."""
    stream = stream_of(jobs)
    outcome = run(stream, Fleet(devices), Limits(8), Conserving())
    longest_s = max(max(lane.latencies_s) for lane in outcome.lanes.values())
    if devices == 1:
        assert outcome.busy_s <= outcome.end_s
        assert outcome.busy_s >= longest_s - 1e-9


def longest_wait_beside_a_flood_s(lane: Lane, devices: int, seed: int, flood_s: float) -> float:
    """A second in which a class has half more jobs than there is room, beside one job each 100 ms.

    Args:
        lane: Of the few jobs.
        devices: How many there are.
        seed: When the few jobs come.
        flood_s: When the many jobs begin to come; 100 come at once.
    """
    fleet = Fleet(devices)
    many = arrivals(
        steady_times(1.5 * fleet.capacity_per_s(8), 100), JobKind({HIGH: 1.0}), Random(0)
    )
    flood = (each._replace(time_s=each.time_s + flood_s) for each in many)
    few = arrivals(poisson_times(10.0, Random(seed)), JobKind({lane: 1.0}), Random(seed))
    stream = itertools.takewhile(lambda each: each.time_s < 1.0, together(flood, few))
    outcome = run([Arrival(0.0, TASK, HIGH), Arrival(0.0, TASK, lane), *stream], fleet)
    return max(outcome.lanes[lane].latencies_s)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    lane=st.sampled_from([NORMAL, LOW, Lane("low", "small")]),
    devices=st.integers(1, 3),
)
def test_no_job_starves_beside_a_class_that_fills_all_devices(
    seed: int, lane: Lane, devices: int
) -> None:
    """Its lane has at least a fifth of the time and needs less. So it waits for what is on the
    devices, and for what they were charged too much while the times of batches were not known well.
    """
    wait_s = longest_wait_beside_a_flood_s(lane, devices, seed, flood_s=0.1)
    assert wait_s < MAX_WAIT_BATCHES * Fleet().service.seconds(8)


def test_no_job_starves_beside_a_flood_of_a_task_that_never_ran() -> None:
    wait_s = longest_wait_beside_a_flood_s(NORMAL, 1, 0, flood_s=0.0)
    assert wait_s < MAX_WAIT_BATCHES * Fleet().service.seconds(8)


#: When all jobs of two lanes come at once, in seconds; a few have come before.
BACKLOG_S = 500.0


class Accountant(RealScheduler):
    """Adds up what each lane was given, while both wait."""

    def __init__(self) -> None:
        super().__init__(SHARES)
        self.given_s: dict[Lane, float] = defaultdict(float)
        self.gaps: list[float] = []

    def ended(self, batch: SimulatedBatch, run_s: float | None, load_s: float = 0.0) -> None:
        super().ended(batch, run_s, load_s)
        assert run_s is not None
        for job in batch.jobs if batch.jobs[0].arrived_s >= BACKLOG_S else ():
            self.given_s[job.lane] += run_s * job.items / batch.items
        waiting = {job.lane for job in self}
        if len(waiting) == 2:
            first, second = (self.given_s[lane] / SHARES[lane.priority_class] for lane in waiting)
            self.gaps.append(abs(first - second))


@settings(deadline=None, max_examples=30)
@given(
    lanes=st.lists(st.sampled_from([HIGH, NORMAL, LOW]), min_size=2, max_size=2, unique=True),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    item_ms=st.tuples(st.floats(0.1, 20.0), st.floats(0.1, 20.0)),
)
def test_two_backlogged_classes_on_one_device_stay_within_two_batches_of_each(
    lanes: list[Lane], sizes: tuple[int, int], item_ms: tuple[float, float]
) -> None:
    """The bound of `test_shares.py`, with what the engine adds: two batches are on the device."""
    service = ServiceTime(pass_ms=5.0, item_ms=max(item_ms))
    both = list(zip(("embed", "label"), lanes, sizes, strict=True))
    # The first jobs come one by one, then eight at a time: they teach what batches cost.
    stream = [Arrival(5.0 * n, *both[n % 2]) for n in range(80) for _ in range(1 + n // 40 * 7)]
    stream += [Arrival(BACKLOG_S, *each) for each in both for _ in range(100)]
    policy = Accountant()
    run(stream, Fleet(1, service), policy=policy)
    bound = sum(
        3 * service.seconds(max(items, 8)) / SHARES[lane.priority_class]
        for lane, items in zip(lanes, sizes, strict=True)
    )
    assert policy.gaps
    assert max(policy.gaps) <= bound


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 6), load=st.floats(0.3, 2.0))
def test_one_more_device_never_makes_the_whole_later_than_by_a_batch(
    seed: int, devices: int, load: float
) -> None:
    """Throughput over the whole run: only the last batch may end later, by its whole length.

    With more devices batches are smaller, so that the last one may begin later than with fewer.
    """
    rate_per_s = load * Fleet(devices).capacity_per_s(8)
    kind = JobKind({HIGH: 0.4, LOW: 0.6})

    def end_s(count: int) -> float:
        random = Random(seed)
        stream = itertools.islice(arrivals(poisson_times(rate_per_s, random), kind, random), 600)
        return run(stream, Fleet(count)).end_s

    assert end_s(devices + 1) <= end_s(devices) + Fleet().service.seconds(8)


def test_the_same_seed_gives_the_same_outcome() -> None:
    def once(seed: int) -> SimulatedRun:
        random = Random(seed)
        kind = JobKind({HIGH: 1.0, LOW: 2.0})
        stream = itertools.islice(arrivals(poisson_times(900.0, random), kind, random), 2000)
        fleet = Fleet(3, ServiceTime(noise=0.2), {1: 2.0}, {2: 0.5})
        policy = RealScheduler(SHARES)
        return Simulation(policy, fleet, Limits(16), seed).run(stream)

    assert once(7) == once(7)
    assert once(7) != once(8)


def test_a_thousand_devices_do_nearly_a_thousand_times_as_much() -> None:
    """Every batch takes 42 ms, and there are always enough jobs for full ones."""

    def rate(devices: int) -> float:
        jobs = 8 * 4 * devices
        stream = (Arrival(0.0, "task", HIGH, items=16) for _ in range(jobs))
        return run(stream, Fleet(devices), Limits(64)).items_per_s

    assert rate(1000) >= 0.9 * 1000 * rate(1)


def test_jobs_that_were_given_up_are_counted_and_wait_no_longer() -> None:
    class Strict(RealScheduler):
        def take_late(self, now_s: float) -> list[SimulatedJob]:
            late = [job for job in self.held() if job.lane == LOW]
            self.remove(late)
            return late

    stream = [Arrival(0.0, "task", HIGH), Arrival(0.001, "task", LOW, deadline_s=0.5)]
    outcome = run(stream, policy=Strict(SHARES))
    low = outcome.lanes[LOW]
    assert (low.shed, low.left, low.late, low.with_deadline) == (1, 0, 1, 1)
