"""Devices with slots in virtual time, with the real scheduler."""

from collections.abc import Sequence

import pytest

from batchery_worker.job import Lane
from batchery_worker.simulator.engine import Fleet, ServiceTime
from batchery_worker.simulator.outcome import SimulatedRun
from batchery_worker.simulator.policies import FixedBatcher, Policy, SlotScheduler
from batchery_worker.simulator.slots import SlotSimulation
from batchery_worker.simulator.workload import TASK, Arrival

SHARES = {"high": 50.0, "low": 20.0}
HIGH, LOW = Lane("high"), Lane("low")

#: A step takes 10 ms, whoever is in it.
STEADY = Fleet(service=ServiceTime(pass_ms=10.0, item_ms=0.0))


def job(time_s: float, steps: int, lane: Lane = LOW, prompt: int = 0) -> Arrival:
    return Arrival(time_s, TASK, lane, steps, prompt)


def run(
    jobs: Sequence[Arrival],
    slots: int = 2,
    fleet: Fleet = STEADY,
    policy: Policy | None = None,
    **options: object,
) -> SimulatedRun:
    policy = SlotScheduler(SHARES) if policy is None else policy
    return SlotSimulation(policy, fleet, slots, **options).run(jobs)  # type: ignore[arg-type]


def test_a_short_job_leaves_while_a_long_one_goes_on_and_the_next_takes_its_slot() -> None:
    outcome = run([job(0, 10), job(0, 2), job(0, 3)])
    assert list(outcome.lanes[LOW].latencies_s) == pytest.approx([0.02, 0.05, 0.1])
    assert list(outcome.lanes[LOW].first_s) == pytest.approx([0.01, 0.01, 0.03])
    assert (outcome.items, outcome.done) == (15, 3)
    assert outcome.end_s == pytest.approx(0.1)
    # Of 20 slots times steps, 15 were taken.
    assert outcome.utilisation == pytest.approx(0.75)


def test_a_static_batch_is_answered_with_its_longest_job() -> None:
    policy = FixedBatcher(2, 0.0)
    outcome = run([job(0, 10), job(0, 2), job(0, 3)], policy=policy, is_static=True)
    assert list(outcome.lanes[LOW].latencies_s) == pytest.approx([0.1, 0.1, 0.13])


def test_a_static_batch_that_is_not_full_leaves_when_its_time_is_over() -> None:
    policy = FixedBatcher(4, 0.5)
    outcome = run([job(0, 1), job(0.2, 1)], 4, policy=policy, is_static=True)
    assert list(outcome.lanes[LOW].latencies_s) == pytest.approx([0.51, 0.31])


def test_a_step_costs_each_slot_and_each_token_of_a_prompt_once() -> None:
    fleet = Fleet(service=ServiceTime(pass_ms=10.0, item_ms=1.0, token_ms=0.1))
    outcome = run([job(0, 2, prompt=100), job(0, 1, prompt=50)], fleet=fleet)
    # 10 + 2 + 15 ms, then 10 + 1 ms.
    assert list(outcome.lanes[LOW].latencies_s) == pytest.approx([0.027, 0.038])


def test_a_higher_class_takes_the_slot_of_the_job_that_came_last_only_if_it_may() -> None:
    jobs = [job(0, 100), job(0.005, 100), job(0.205, 3, HIGH)]
    waits, takes = run(jobs), run(jobs, preempting=[*SHARES])
    assert waits.lanes[HIGH].first_s[0] > 0.5
    # It comes in the midst of a step, and is part of the next one.
    assert takes.lanes[HIGH].first_s[0] == pytest.approx(0.015)
    assert takes.lanes[HIGH].latencies_s[0] == pytest.approx(0.035)
    # Put aside for three steps, none of which is computed again.
    assert sorted(takes.lanes[LOW].latencies_s) == pytest.approx([1.0, 1.035])


def test_what_was_put_aside_reads_its_tokens_again() -> None:
    fleet = Fleet(service=ServiceTime(pass_ms=10.0, item_ms=0.0, token_ms=1.0))
    jobs = [job(0, 10, prompt=5), job(0.055, 1, HIGH)]
    outcome = run(jobs, 1, fleet, preempting=[*SHARES])
    # Ten steps, five tokens of its prompt; then a step of another, and 5 + 5 tokens once more.
    assert outcome.lanes[LOW].latencies_s[0] == pytest.approx(0.1 + 0.005 + 0.01 + 0.01)


def test_no_class_takes_a_slot_of_its_own_or_of_a_higher_one() -> None:
    jobs = [job(0, 50, HIGH), job(0.1, 1, HIGH), job(0.1, 1)]
    outcome = run(jobs, 1, preempting=[*SHARES])
    assert outcome.lanes[HIGH].latencies_s[0] == pytest.approx(0.5)


def test_several_devices_and_a_slow_one() -> None:
    fleet = Fleet(2, STEADY.service, slowness={1: 3.0})
    outcome = run([job(0, 10), job(0, 10)], 1, fleet)
    assert sorted(outcome.lanes[LOW].latencies_s) == pytest.approx([0.1, 0.3])


def test_live_jobs_have_a_slot_at_the_next_step_though_nobody_knows_how_long_bulk_takes() -> None:
    # Ten of 16 slots are less than the share of their class, which is five sevenths.
    live = [job(0.5 + number * 0.02, 20, HIGH) for number in range(100)]
    bulk = [job(0.0, 2000) for _ in range(32)]
    outcome = run([*bulk, *live], 16, preempting=[*SHARES])
    assert max(outcome.lanes[HIGH].first_s) <= 0.02


@pytest.mark.parametrize("preempting", [[], [*SHARES]])
@pytest.mark.parametrize("steps", [(20, 200), (200, 20)])
def test_lanes_have_their_shares_of_the_slots_however_long_their_jobs_are(
    steps: tuple[int, int], preempting: list[str]
) -> None:
    lanes = [(HIGH, steps[0], 50), (LOW, steps[1], 20)]
    # As much of each as it has in 60 seconds: then both are done at about the same time.
    jobs = [
        job(0.0, each, lane)
        for lane, each, share in lanes
        for _ in range(round(6000 * 7 * share / 70 / each))
    ]
    outcome = run(jobs, 7, preempting=preempting)
    ends_s = [max(outcome.lanes[lane].latencies_s) for lane, _, _ in lanes]
    assert ends_s == pytest.approx([60.0, 60.0], rel=0.05)
