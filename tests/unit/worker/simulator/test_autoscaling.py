"""KEDA's rule, and pods that come and go in virtual time."""

from dataclasses import replace

import pytest

from batchery_worker.job import Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime, Simulation
from batchery_worker.simulator.policies import RealScheduler
from batchery_worker.simulator.workload import DEFAULT_SHARES, TASK, Arrival
from benchmarks.scheduling.autoscaling import (
    DEVICE,
    HOUR_S,
    LIVE,
    Pods,
    Trial,
    find_share,
    make_day,
    run_day,
)
from benchmarks.scheduling.keda import SYNC_S, Autoscaler, Scaling, read_scaling

SCALING = Scaling(
    max_replicas=8, cooldown_s=300, stabilization_s=300, jobs_per_replica=10, oldest_s=30
)


@pytest.mark.parametrize(
    ("jobs", "oldest_s", "ready", "replicas"),
    [
        pytest.param(45, 0, 4, 5, id="jobs: rounded up"),
        pytest.param(43, 0, 4, 4, id="jobs: less than a tenth too many"),
        pytest.param(40, 60, 4, 8, id="age: a multiple of the ready pods"),
        pytest.param(40, 60, 1, 4, id="age: those that load do not count"),
        pytest.param(40, 32.9, 4, 4, id="age: less than a tenth too old"),
        pytest.param(55, 33.5, 4, 6, id="the larger wish"),
        pytest.param(10**6, 10**6, 4, 8, id="the maximum"),
    ],
)
def test_it_scales_up_by_the_larger_wish(
    jobs: float, oldest_s: float, ready: int, replicas: int
) -> None:
    autoscaler = Autoscaler(SCALING, 4)
    autoscaler.sync(0, jobs, oldest_s, ready)
    assert autoscaler.replicas == replicas


def test_it_at_most_doubles_or_adds_four() -> None:
    autoscaler = Autoscaler(replace(SCALING, max_replicas=100), 1)
    seen = []
    for number in range(5):
        autoscaler.sync(number * SYNC_S, 10_000, 0, 1)
        seen.append(autoscaler.replicas)
    assert seen == [5, 10, 20, 40, 80]


def test_it_scales_down_after_the_window_one_pod_a_minute() -> None:
    autoscaler = Autoscaler(SCALING, 3)
    autoscaler.sync(0, 30, 0, 3)
    went_s = []
    for number in range(1, 60):
        before = autoscaler.replicas
        autoscaler.sync(number * SYNC_S, 1, 0, before)
        if autoscaler.replicas < before:
            went_s.append(number * SYNC_S)
    assert went_s == [300, 360]
    assert autoscaler.replicas == 1


def test_the_first_pod_comes_with_a_job_and_the_last_goes_after_the_cooldown() -> None:
    autoscaler = Autoscaler(SCALING, 0)
    autoscaler.sync(0, 100, 0, 0)
    assert autoscaler.replicas == 0
    autoscaler.poll(10, 1, 0)
    assert autoscaler.replicas == 1
    autoscaler.poll(310, 0, 0)
    assert autoscaler.replicas == 1
    autoscaler.poll(311, 0, 0)
    assert autoscaler.replicas == 0


def test_one_at_least_stays() -> None:
    autoscaler = Autoscaler(replace(SCALING, min_replicas=1), 1)
    autoscaler.poll(10_000, 0, 0)
    assert autoscaler.replicas == 1


def test_a_device_that_is_stopped_finishes_what_it_holds_and_can_start_again() -> None:
    began_s: list[float] = []
    stopped_s: list[float] = []
    simulation = Simulation(
        RealScheduler(DEFAULT_SHARES),
        Fleet(1, ServiceTime(pass_ms=1000, item_ms=0)),
        Limits(1),
        on_done=lambda *done: began_s.append(done[1]),
    )
    simulation.call_at(0.5, lambda _: simulation.stop_device(0, stopped_s.append))
    simulation.call_at(5.0, lambda _: simulation.start_device(0))
    done = simulation.run([Arrival(0.0, TASK, LIVE), Arrival(1.0, TASK, LIVE)])
    assert (began_s, stopped_s, done.done, done.rerun) == ([0.0, 5.0], [1.0], 2, 0)


def test_a_pod_that_still_loads_goes_at_once_and_never_serves() -> None:
    simulation = Simulation(RealScheduler(DEFAULT_SHARES), Fleet(2, DEVICE), Limits(1))
    pods = Pods(simulation, 2, start_s=90)
    simulation.call_at(0.0, lambda now_s: pods.scale(1, now_s))
    simulation.call_at(60.0, lambda now_s: pods.scale(0, now_s))
    simulation.run([])
    assert (pods.ready, pods.starts, pods.paid_s, pods.longest_stop_s) == (0, 1, 60.0, 0.0)


def test_minutes_with_the_numbers_of_the_chart_lose_no_job() -> None:
    minutes = 40
    jobs = make_day(7.0, minutes / 60, 8.0, 0, seed=1)
    row = run_day(Trial("", 0, replace(read_scaling(), min_replicas=0)), jobs, minutes * 60, 90.0)
    assert row["live"]["jobs"] == len(jobs) > 1000
    assert (row["unfinished"], row["begun_twice"]) == (0, 0)
    # The first job waits until its pod has loaded, and has been noticed.
    assert 90 <= row["live"]["longest_s"] < 300
    assert 0 < row["gpu_hours"] <= 4 * minutes * 60 / HOUR_S + 0.1


def test_a_day_follows_the_hours_and_is_the_same_each_time() -> None:
    jobs = make_day(0.0, 24.0, 0.5, 10, seed=3)
    assert jobs == make_day(0.0, 24.0, 0.5, 10, seed=3)
    by_hour = [sum(int(job.time_s // HOUR_S) == hour for job in jobs) for hour in range(24)]
    assert max(by_hour[:5]) <= 12 < min(by_hour[8:17])
    assert find_share(9.5) == pytest.approx(0.95)
    assert [job.time_s for job in jobs] == sorted(job.time_s for job in jobs)


def test_an_age_that_one_scrape_saw_adds_no_pods() -> None:
    """The first pod is ready, and the age is still that of the jobs that waited for it."""
    autoscaler = Autoscaler(SCALING, 1)
    for number, (oldest_s, ready) in enumerate([(60, 0), (90, 1), (0, 1)]):
        autoscaler.sync(number * SYNC_S, 1, oldest_s, ready)
        assert autoscaler.replicas == 1
    autoscaler.sync(3 * SYNC_S, 1, 90, 1)
    assert autoscaler.replicas == 1
    autoscaler.sync(4 * SYNC_S, 1, 90, 1)
    assert autoscaler.replicas == 3
