"""Each rival follows its own rule: small scenarios, with times that are known."""

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.job import BatchKey, Job, Lane, Limits
from batchery_worker.simulator.engine import Fleet, Simulation
from batchery_worker.simulator.policies import FixedBatcher, Policy, SimulatedBatch, SimulatedJob
from batchery_worker.simulator.workload import Arrival
from benchmarks.scheduling.rivals import (
    AdaptiveRival,
    AimdRival,
    BentoRival,
    PriorityRival,
    Rival,
    RivalByTask,
    fitted_line,
)

CLASSES = ("high", "normal", "low")
KEY = BatchKey("task")

#: Name -> makes one with batches of up to 8.
RIVALS: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: FixedBatcher(8, 0.01),
    "aimd": lambda: AimdRival(8, 0.1),
    "bento": lambda: BentoRival(8, 10.0),
    "adaptive": lambda: AdaptiveRival(8, 0.01, 0.1),
    "priority": lambda: PriorityRival(8, 0.01, CLASSES),
}


def job(
    arrived_s: float = 0.0, lane: str = "high", items: int = 1, task: str = "task"
) -> SimulatedJob:
    arrival = Arrival(arrived_s, task, Lane(lane), items)
    return Job("", BatchKey(task), Limits(8), items, arrived_s, arrival, arrival.lane)


def admit(rival: Policy, *jobs: SimulatedJob) -> None:
    for each in jobs:
        rival.admit(each)


def ask(rival: Policy, now_s: float) -> SimulatedBatch | None:
    return rival.next_batch(0, False, now_s)


def sent(rival: Policy, now_s: float) -> SimulatedBatch:
    batch = ask(rival, now_s)
    assert batch is not None
    return batch


def test_fixed_waits_for_its_timeout_even_on_an_idle_device() -> None:
    rival = FixedBatcher(8, timeout_s=0.01)
    admit(rival, job(1.0), job(1.004))
    assert ask(rival, 1.009) is None
    assert rival.wake_s() == pytest.approx(1.01)
    assert sent(rival, 1.01).items == 2


def test_fixed_does_not_wait_when_it_is_full() -> None:
    rival = FixedBatcher(4, timeout_s=0.01)
    admit(rival, *[job(1.0)] * 6)
    assert [sent(rival, 1.0).items, ask(rival, 1.0), len(rival)] == [4, None, 2]


def test_a_job_that_is_larger_than_a_batch_is_one_by_itself() -> None:
    rival = FixedBatcher(4, timeout_s=0.01)
    admit(rival, job(items=9), job())
    assert sent(rival, 0.0).items == 9


def test_aimd_grows_by_one_while_batches_are_in_time_and_is_cut_by_a_tenth() -> None:
    rival = AimdRival(64, target_s=0.1)
    admit(rival, *[job()] * 1000)
    sizes = []
    for _ in range(20):
        batch = sent(rival, 0.0)
        sizes.append(batch.items)
        rival.ended(batch, 0.05)
    assert sizes == list(range(1, 21))
    rival.ended(sent(rival, 0.0), 0.11)
    assert sent(rival, 0.0).items == 18  # nine tenths of 21
    assert rival.wake_s() == 0.0  # It takes what is there.


def test_aimd_learns_nothing_from_a_batch_that_was_not_full() -> None:
    rival = AimdRival(64, target_s=0.1)
    admit(rival, job(), job())
    rival.ended(sent(rival, 0.0), 0.05)
    rival.ended(sent(rival, 0.0), 0.05)
    assert rival.size == 2


def taught_bento(max_latency_s: float, devices: int = 1) -> tuple[BentoRival, float]:
    """Batches take 10 ms and 1 ms for each job; jobs waited 40 ms. Returns what it is, and when."""
    rival = BentoRival(64, max_latency_s, devices)
    now_s = 0.0
    for number in range(80):
        now_s += 1.0
        jobs = 1 + number % 8
        admit(rival, *[job(now_s - 0.04)] * jobs)
        rival.ended(sent(rival, now_s), 0.01 + 0.001 * jobs)
    return rival, now_s + 1.0


def test_bento_waits_while_it_is_worth_it() -> None:
    rival, now_s = taught_bento(1.0)
    # Two jobs: each of them would wait for one that is to come. 2 * (wait + 2 ms) <= 38 ms.
    admit(rival, job(now_s), job(now_s))
    assert ask(rival, now_s) is None
    assert rival.wake_s() == pytest.approx(now_s + 0.04 * 0.95 / 2 - 0.001 - 0.001)
    assert ask(rival, now_s + 0.0169) is None
    assert sent(rival, now_s + 0.0171).items == 2


@pytest.mark.parametrize(("devices", "kept"), [(1, 60), (4, 90)])
def test_bento_gives_up_jobs_that_would_be_late(devices: int, kept: int) -> None:
    rival, now_s = taught_bento(0.1, devices)
    # They waited for 30 ms, so that 60 ms are left for the items of one device.
    admit(rival, *[job(now_s - 0.0299)] * 90)
    assert rival.next_batch(1, False, now_s) is None
    assert (len(rival), len(rival.take_late(0.0)), rival.take_late(0.0)) == (kept, 90 - kept, [])


def test_bento_gives_up_the_last_job_when_all_of_its_time_is_over() -> None:
    rival, now_s = taught_bento(0.1)
    admit(rival, job(now_s))
    assert rival.next_batch(1, False, now_s + 0.099) is None
    assert len(rival) == 1
    assert rival.next_batch(1, False, now_s + 0.101) is None
    assert len(rival) == 0


@pytest.mark.parametrize(
    ("points", "line"),
    [([(1, 3.0), (2, 5.0), (3, 7.0)], (2.0, 1.0)), ([(2, 5.0), (2, 5.0)], (2.0, 1.0))],
)
def test_the_line_has_the_least_squares(
    points: Sequence[tuple[int, float]], line: tuple[float, float]
) -> None:
    assert fitted_line(points) == pytest.approx(line)


@pytest.mark.parametrize(("run_s", "size"), [(0.05, 10), (0.1, 8), (0.13, 6)])
def test_adaptive_follows_the_time_of_the_last_batches(run_s: float, size: int) -> None:
    rival = AdaptiveRival(64, timeout_s=0.01, target_s=0.1)
    admit(rival, *[job()] * 200)
    for _ in range(AdaptiveRival.BATCHES):
        assert rival.size == 8
        rival.ended(sent(rival, 1.0), run_s)
    assert rival.size == size


def lanes_of(batch: SimulatedBatch) -> list[int]:
    names = [each.lane.priority_class for each in batch.jobs]
    return [names.count(each) for each in CLASSES]


@pytest.mark.parametrize(
    ("waiting", "taken"),
    [
        ((20, 20, 20), [5, 3, 2]),
        ((20, 0, 20), [5, 0, 5]),
        ((20, 20, 0), [7, 3, 0]),
        ((1, 20, 1), [1, 8, 1]),
        ((0, 0, 20), [0, 0, 10]),
        ((2, 1, 1), [2, 1, 1]),
    ],
)
def test_priority_has_parts_of_each_batch_and_leaves_none_unused(
    waiting: tuple[int, int, int], taken: list[int]
) -> None:
    rival = PriorityRival(10, 0.01, CLASSES)
    for name, count in zip(CLASSES, waiting, strict=True):
        admit(rival, *[job(lane=name)] * count)
    assert lanes_of(sent(rival, 0.01)) == taken
    assert len(rival) == sum(waiting) - sum(taken)


@pytest.mark.parametrize("name", RIVALS)
def test_a_busy_device_gets_nothing(name: str) -> None:
    rival = RIVALS[name]()
    admit(rival, *[job()] * 100)
    assert rival.next_batch(1, False, 5.0) is None


@pytest.mark.parametrize("name", RIVALS)
def test_the_task_whose_job_is_oldest_is_first(name: str) -> None:
    rival = RIVALS[name]()
    admit(rival, job(1.0, task="b"), job(0.5, task="a"), job(0.7, task="b"))
    assert sent(rival, 5.0).jobs[0].key.task == "a"


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(RIVALS)),
    jobs=st.lists(
        st.tuples(st.floats(0, 0.05), st.sampled_from(CLASSES), st.integers(1, 10)), min_size=1
    ),
    death_s=st.floats(0.001, 0.3),
)
def test_no_rival_loses_a_job_even_where_a_device_dies(
    name: str, jobs: list[tuple[float, str, int]], death_s: float
) -> None:
    now_s, stream = 0.0, []
    for pause_s, lane, items in jobs:
        now_s += pause_s
        stream.append(Arrival(now_s, "task", Lane(lane), items))
    fleet = Fleet(2, deaths_s={0: death_s})
    outcome = Simulation(RIVALS[name](), fleet, Limits(8)).run(stream)
    assert outcome.done + sum(lane.shed for lane in outcome.lanes.values()) == len(jobs)
    assert not any(lane.left for lane in outcome.lanes.values())


def test_each_task_has_a_size_of_its_own() -> None:
    rival = RivalByTask(lambda: AimdRival(64, target_s=0.1))
    runs_s = {"quick": 0.05, "slow": 0.2}
    for task in runs_s:
        admit(rival, *[job(task=task)] * 64)
    sizes: dict[str, list[int]] = {task: [] for task in runs_s}
    while (batch := rival.next_batch(0, False, 0.0)) is not None:
        task = batch.jobs[0].key.task
        sizes[task].append(batch.items)
        rival.ended(batch, runs_s[task])
    assert sizes["quick"][:5] == [1, 2, 3, 4, 5]
    assert sizes["slow"] == [1] * 64


def test_the_task_whose_job_has_waited_longest_goes_first_if_it_gives_a_batch() -> None:
    rival = RivalByTask(lambda: Rival(2, timeout_s=1.0))
    rival.admit(job(0.0, task="first"))
    for _ in range(3):
        rival.admit(job(0.5, task="second"))
    assert (len(rival), rival.wake_s()) == (4, 1.0)
    batch = rival.next_batch(0, False, 0.5)
    assert batch is not None
    assert [each.key.task for each in batch.jobs] == ["second", "second"]
    assert rival.next_batch(0, False, 0.5) is None
    batch = rival.next_batch(0, False, 1.5)
    assert batch is not None
    assert batch.jobs[0].key.task == "first"
    rival.quarantine(batch.jobs[0])
    rival.ended(batch, None)
    batch = rival.next_batch(0, False, 1.5)
    assert batch is not None
    assert batch.alone


def test_the_product_s_fixed_batcher_follows_the_rule_of_the_rivals() -> None:
    random = Random(7)
    now_s, stream = 0.0, []
    for _ in range(2000):
        now_s += random.expovariate(900.0)
        stream.append(Arrival(now_s, random.choice("ab"), Lane("high"), random.randint(1, 10)))

    def run(policy: Policy) -> tuple[int, float, list[float]]:
        outcome = Simulation(policy, Fleet(2), Limits(8)).run(stream)
        return outcome.batches, outcome.end_s, sorted(outcome.lanes[Lane("high")].latencies_s)

    assert run(FixedBatcher(8, 0.01)) == run(RivalByTask(lambda: Rival(8, 0.01)))
