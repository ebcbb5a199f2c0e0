"""What becomes of jobs between Celery and the devices; seen by their callers and on the queue."""

import time
from collections.abc import Sequence

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.worker import state as worker_state

from apps.batches import FOUR, LIMITED, PATIENT, app
from batchery import BatchArgumentError, DeadlineExceeded, DeviceDied
from batchery.installation import get_installation
from batchery_worker.batching.batch_times import BatchTimes
from batchery_worker.ipc.messages import Began, Done
from batchery_worker.request import BatchRequest
from support.fake_devices import FORWARD_MS
from support.fake_worker import FakeChannel, FakeLeaseStore, StartPool

# From Celery to a device


def test_jobs_read_in_one_turn_share_a_batch_and_get_their_own_results(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    requests = worker.receive_each("a", "b", "c")
    assert worker.device.hear() == []
    assert worker.works() == [["a", "b", "c"]]
    worker.work_off()
    assert worker.results(requests) == ["a", "b", "c"]
    worker.settled(*requests)
    assert sorted(worker.channel.acknowledged) == ["1", "2", "3"]


def test_a_busy_device_gets_one_more_batch_only_if_that_is_full(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive_each(1)
    assert worker.works() == [[1]]
    worker.receive_each(2, 3, 4)
    assert worker.works() == [[1]]
    worker.receive_each(5, 6, 7, 8, 9, 10)
    assert worker.works() == [[1], [2, 3, 4, 5]]
    info = worker.info()
    assert info["waiting"] == 5
    # This broker names no queue.
    assert info["waiting_by_queue"][""]["jobs"] == 5
    assert info["devices"]["cpu"]["batches_in_flight"] == 2
    # With the first one back, the next full one goes; the tenth waits for company.
    worker.device.answer()
    assert worker.works() == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]
    worker.work_off()
    assert worker.works()[-1] == [10]


def test_the_batch_behind_a_long_one_is_sent_when_that_is_almost_done(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.receive_each(1, 2, 3, 4)
    assert worker.works() == [[1, 2, 3, 4]]
    worker.loop.sleep(2.0)
    worker.device.answer()
    worker.receive_each(*range(5, 13))
    assert worker.works()[1:] == [[5, 6, 7, 8]]
    # Until then the next four could go to another worker.
    worker.loop.sleep(1.4)
    assert worker.info()["waiting"] == 4
    worker.loop.sleep(0.2)
    assert worker.works()[2:] == [[9, 10, 11, 12]]


def test_the_batch_behind_a_short_one_is_sent_at_once_and_nothing_is_planned(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.receive_each(1)
    worker.work_off()
    planned, worker.loop.clock.look_s = worker.loop.planned, 1e-6
    worker.receive_each(*range(2, 10))
    worker.loop.run_once()
    assert worker.works()[1:] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert worker.loop.planned == planned


def test_how_long_a_batch_was_prepared_is_learned_in_seconds(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[tuple[object, ...]] = []
    monkeypatch.setattr(BatchTimes, "ran", lambda _, *measured: learned.append(measured))
    worker = start_pool()
    worker.receive_each("a", "b")
    assert worker.works() == [["a", "b"]]
    (work,) = worker.device.hear()
    answers = [("needs tracer", ("value", items[0])) for _, items, _ in work.jobs]
    worker.device.say(Done(work.id, answers, FORWARD_MS, 0, 0, prepare_ms=30.0))
    worker.loop.settle()
    ((*_, items, _, prepare_s),) = learned
    assert (items, prepare_s) == (2, 0.03)


def test_what_a_batch_of_a_task_costs_is_learned_and_shown(start_pool: StartPool) -> None:
    worker = start_pool()
    assert worker.info()["costs"] == {}
    for number in range(18):
        items = range(1 + number % 4)
        worker.receive_each(*items)
        worker.works()
        worker.loop.sleep(0.1 + 0.02 * len(items))
        worker.device.answer()
        worker.loop.settle()
    costs = worker.info()["costs"][FOUR]
    assert costs["item_us"] == pytest.approx(20_000, rel=0.2)
    assert costs["pass_ms"] == pytest.approx(100, rel=0.1)
    assert costs["batches"] == 16


def test_the_next_batch_is_taken_when_a_long_one_is_about_to_end(start_pool: StartPool) -> None:
    worker = start_pool()
    asked: list[float] = []
    demand = worker.pool.find_demand()
    assert demand is not None
    demand.ask_for_more = lambda: asked.append(worker.loop.clock.now_s)
    # Nobody knows how long a batch takes: one for the idle device, of each class.
    assert (demand.free(), demand.limit({FOUR: 4}, 0)) == (4, 4)
    worker.receive_each(1, 2, 3, 4)
    worker.works()
    worker.loop.sleep(2.0)
    assert (demand.free(), demand.limit({FOUR: 4}, 0)) == (0, 0)
    worker.device.answer()
    worker.receive_each(5, 6, 7, 8)
    worker.works()
    began_s = worker.loop.clock.now_s
    # As they have left, others may come; but no more of these.
    assert asked.pop() == began_s
    asked.clear()
    worker.loop.sleep(1.4)
    assert (demand.limit({FOUR: 4}, 0), asked) == (0, [])
    worker.loop.sleep(0.2)
    assert asked == [pytest.approx(began_s + 1.5)]
    assert demand.limit({FOUR: 4}, 0) == 4
    worker.receive_each(9)
    assert demand.limit({FOUR: 4}, 0) == 3
    # Jobs of another class are not kept out by these.
    assert demand.limit({FOUR: 4}, 6) == 4
    # It takes longer than any of late: nobody knows when it ends.
    worker.loop.sleep(2.0)
    assert demand.limit({FOUR: 4}, 0) == 0


def test_jobs_of_a_higher_class_are_taken_while_a_long_batch_runs(start_pool: StartPool) -> None:
    worker = start_pool()
    demand = worker.pool.find_demand()
    assert demand is not None
    worker.receive_each(1, 2, 3, 4, priority=6)
    worker.works()
    worker.loop.sleep(2.0)
    assert [demand.limit({FOUR: 4}, level) for level in (0, 6)] == [4, 0]
    # One that has come runs between the passes: until it has begun, no other one is wanted.
    worker.receive_each(5)
    assert worker.works()[1:] == [[5]]
    assert [demand.limit({FOUR: 4}, level) for level in (0, 6)] == [0, 0]


def test_while_a_suspect_runs_only_jobs_of_others_are_taken(start_pool: StartPool) -> None:
    worker = start_pool()
    demand = worker.pool.find_demand()
    assert demand is not None
    worker.receive_each("kill", "mate")
    worker.works()
    worker.device.die()
    worker.loop.settle()
    assert (demand.free(), demand.limit({FOUR: 4}, 0)) == (0, 0)
    assert demand.limit({FOUR: 4}, 0, others=3) == 3


def test_behind_short_batches_some_more_are_taken(start_pool: StartPool) -> None:
    worker = start_pool()
    demand = worker.pool.find_demand()
    assert demand is not None
    for items in ((1, 2, 3, 4), (5, 6, 7, 8)):
        worker.receive_each(*items)
        worker.works()
        worker.loop.sleep(0.01)
        worker.device.answer()
        worker.loop.settle()
    batches = 1 + get_installation(app).settings.prefetch_batches
    assert demand.limit({FOUR: 4}, 0) == 4
    worker.receive_each(9)
    worker.works()
    # Such a batch is new, but those of its task are short.
    assert demand.limit({FOUR: 4}, 0) == batches * 4
    # Nothing is known of another task.
    assert demand.limit({FOUR: 4, PATIENT: 4}, 0) == 8
    worker.receive_each(*range(10, 15))
    worker.works()
    # Two batches are there, and one job waits.
    assert demand.limit({FOUR: 4}, 0) == batches * 4 - 1
    assert demand.limit({FOUR: 4}, 0, others=3) == batches * 4 + 2
    worker.loop.sleep(1.0)
    assert demand.limit({FOUR: 4}, 0) == 0


def test_jobs_behind_a_long_batch_may_go_to_another_worker(start_pool: StartPool) -> None:
    worker = start_pool()
    demand = worker.pool.find_demand()
    assert demand is not None
    worker.receive_each(1, 2, 3, 4)
    worker.works()
    worker.loop.sleep(2.0)
    came_s = worker.loop.clock.now_s
    worker.device.answer()
    requests = worker.receive_each(*range(5, 14))
    worker.works()
    assert (demand.free(), demand.oldest_s()) == (0, came_s)
    offered: list[BatchRequest] = []

    def give(held: Sequence[BatchRequest]) -> Sequence[BatchRequest]:
        offered.extend(held)
        return held[:3]

    assert demand.offer(came_s, give) == 3
    assert offered == requests[4:]
    # The device that is almost done has its next batch here.
    worker.loop.sleep(1.6)
    assert demand.offer(came_s, give) == 0
    assert offered == requests[4:]
    worker.device.answer()
    assert worker.works()[-1] == [12, 13]


def test_the_device_with_the_least_to_do_gets_the_batch(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    for item in (1, 2):
        worker.receive_each(item)
        worker.loop.settle()
    assert (worker.works(first), worker.works(second)) == ([[1]], [[2]])
    # No third one: neither device is idle, and it is not full.
    worker.receive_each(3)
    assert (worker.works(first), worker.works(second)) == ([[1]], [[2]])
    second.answer()
    assert worker.works(second) == [[2], [3]]


def test_job_that_fits_no_batch_fails_at_once_and_alone(start_pool: StartPool) -> None:
    worker = start_pool()
    bad = worker.receive("a", "b")
    (good,) = worker.receive_each("good")
    with pytest.raises(BatchArgumentError, match="exactly one positional argument"):
        worker.result(bad.id)
    assert worker.works() == [["good"]]
    worker.work_off()
    assert worker.result(good.id) == "good"
    worker.settled(bad, good)


def test_a_revoked_job_never_reaches_a_device(start_pool: StartPool) -> None:
    worker = start_pool()
    revoked, mate = worker.receive_each("never", "mate")
    worker_state.revoked.add(revoked.id)
    assert worker.works() == [["mate"]]
    with pytest.raises(TaskRevokedError):
        worker.result(revoked.id)
    worker.settled(revoked)
    assert not mate.acknowledged


def test_a_batch_of_revoked_jobs_does_not_hold_up_the_next_one(start_pool: StartPool) -> None:
    worker = start_pool()
    revoked = worker.receive_each(1, 2, 3, 4)
    worker_state.revoked.update(request.id for request in revoked)
    worker.receive_each(5)
    assert worker.works() == [[5]]


# Waiting for a batch to fill


def test_idle_device_waits_until_the_oldest_job_is_due(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.receive_each(1, task=PATIENT)
    worker.loop.sleep(0.2)
    worker.receive_each(2, task=PATIENT)
    worker.loop.sleep(0.049)
    assert worker.works() == []
    assert worker.info()["oldest_waiting_s"] == 0.249
    worker.loop.sleep(0.001)
    assert worker.works() == [[1, 2]]


def test_full_batch_leaves_at_once(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive_each(1, 2, 3, 4, 5, task=PATIENT)
    assert worker.works() == [[1, 2, 3, 4]]
    worker.device.answer()
    # The fifth has not waited long enough, though the device is idle again.
    worker.loop.sleep(0.249)
    assert worker.works() == [[1, 2, 3, 4]]
    worker.loop.sleep(0.001)
    assert worker.works() == [[1, 2, 3, 4], [5]]


def test_each_waiting_batch_leaves_when_its_own_wait_is_over(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1", "cuda:2")
    for number in range(3):
        worker.receive_each(number, task=PATIENT, kwargs={"key": number})
        worker.loop.sleep(0.1)
    left = []
    for _ in range(4):
        left.append([worker.works(device) for device in worker.devices.started])
        worker.loop.sleep(0.1)
    # At 0.3, 0.4 and 0.5 s those of 0.0, 0.1 and 0.2 s have waited long enough.
    assert [sum(map(len, each)) for each in left] == [1, 2, 3, 3]


def test_loop_sleeps_while_a_suspect_runs_alone(start_pool: StartPool) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    worker.channel.lease_store = FakeLeaseStore()
    # It was alone on a device when its worker died.
    worker.receive_each("suspect", deaths=1)
    worker.receive_each("other")
    # `works` fails if the loop finds something to do again and again.
    assert worker.works(first) == [["suspect"]]
    assert worker.works(second) == []
    first.answer()
    worker.loop.settle()
    batches = worker.works(first) + worker.works(second)
    assert batches == [["suspect"], ["other"]]


# Devices that die


def test_jobs_of_a_dead_device_run_alone_and_are_all_answered(start_pool: StartPool) -> None:
    worker = start_pool()
    requests = worker.receive_each(1, 2, 3, 4, 5)
    assert worker.works() == [[1, 2, 3, 4]]
    requests += worker.receive_each(6, 7, 8)
    assert worker.works() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    worker.device.die()
    worker.loop.sleep(0.1)
    # One at a time, and nothing beside it.
    assert worker.works() == [[1]]
    worker.work_off()
    assert worker.works() == [[number] for number in range(1, 9)]
    assert worker.results(requests) == list(range(1, 9))
    assert worker.info()["batches"]["device_restarts"] == 1


def test_the_job_that_kills_its_device_twice_alone_fails_and_no_other(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    killer, *mates = worker.receive_each("kill", "a", "b")
    worker.work_off()
    with pytest.raises(DeviceDied, match="running alone when the device process for cpu died"):
        worker.result(killer.id)
    assert worker.results(mates) == ["a", "b"]
    worker.settled(killer, *mates)
    # With its mates, alone, alone again; and the last one lives.
    assert [device.code for device in worker.devices.started] == [-9, -9, -9, None]


def test_leased_poison_job_becomes_a_dead_letter(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.channel.lease_store = FakeLeaseStore()
    (killer,) = worker.receive_each("kill")
    worker.work_off()
    with pytest.raises(DeviceDied):
        worker.result(killer.id)
    assert list(worker.channel.lease_store.dead_letters) == ["1"]


def test_jobs_committed_by_a_dead_device_do_not_run_again(start_pool: StartPool) -> None:
    worker = start_pool()
    lease_store = worker.channel.lease_store = FakeLeaseStore()
    committed, fenced, left = worker.receive_each("committed", "fenced", "left")
    assert worker.works() == [["committed", "fenced", "left"]]
    # The leases of two are gone; of one of them this worker has heard why.
    lease_store.held -= {"1", "2"}
    lease_store.believed -= {"2"}
    worker.device.die()
    worker.loop.sleep(0.1)
    assert worker.works() == [["left"]]
    worker.work_off()
    assert worker.result(left.id) == "left"
    worker.settled(committed, fenced, left)
    # The other two messages are gone already, or another worker's.
    assert worker.channel.acknowledged == ["3"]
    batches = worker.info()["batches"]
    assert (batches["committed_jobs"], batches["fenced_jobs"]) == (1, 1)


def test_jobs_of_two_brokers_with_equal_tokens_all_run_again(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    # The broker failed over, and both have a token 2.
    worker.channel.lease_store = FakeLeaseStore()
    (before,) = worker.receive_each("before")
    worker.channel = FakeChannel()
    worker.channel.lease_store = FakeLeaseStore()
    (after,) = worker.receive_each("after")
    assert worker.works() == [["before", "after"]]
    worker.device.die()
    worker.work_off()
    assert worker.results([before, after]) == ["before", "after"]


def test_a_job_that_reaches_its_time_limit_alone_fails_and_its_mates_run_again(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    slow, mate = worker.receive_each("slow", "mate", task=LIMITED)
    behind = worker.receive_each(1, 2, 3, 4)
    assert worker.works() == [["slow", "mate"], [1, 2, 3, 4]]
    worker.loop.sleep(4.9)
    assert worker.device.code is None
    worker.loop.sleep(0.2)
    # It has a process of its own now, and its whole time.
    assert worker.works() == [["slow"]]
    worker.loop.sleep(4.7)
    assert worker.works() == [["slow"]]
    worker.loop.sleep(1.0)
    with pytest.raises(TimeLimitExceeded):
        worker.result(slow.id)
    worker.work_off()
    assert worker.result(mate.id) == "mate"
    assert worker.results(behind) == [1, 2, 3, 4]


def test_a_job_of_a_higher_class_goes_before_the_rest_of_a_batch(start_pool: StartPool) -> None:
    worker = start_pool()
    bulk = worker.receive_each(*range(9), priority=9)
    assert worker.works() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    live = worker.receive_each("live")
    assert worker.works()[2:] == [["live"]]
    assert [work.urgent for work in worker.device.works] == [False, False, True]
    # One at a time.
    live += worker.receive_each("next", "after")
    assert len(worker.works()) == 3
    urgent = worker.device.works[2]
    worker.device.say(Began(urgent.id))
    answers = [("needs tracer", ("value", "live"))]
    worker.device.say(Done(urgent.id, answers, FORWARD_MS, 0, 0))
    worker.work_off()
    assert worker.works()[3] == ["next", "after"]
    assert worker.results([*bulk, *live]) == [*range(9), "live", "next", "after"]


def test_time_of_an_urgent_batch_does_not_count_for_the_one_that_it_interrupts(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.receive_each("bulk", task=LIMITED, priority=9)
    worker.works()
    worker.loop.sleep(2)
    worker.receive_each("live", task=LIMITED)
    assert worker.works() == [["bulk"], ["live"]]
    worker.loop.sleep(1)
    urgent = worker.device.works[1]
    worker.device.say(Began(urgent.id))
    # Five seconds of bulk are over, of which it had three; the limit of live counts from here.
    worker.loop.sleep(4)
    assert worker.device.code is None
    answers = [("needs tracer", ("value", "live"))]
    worker.device.say(Done(urgent.id, answers, FORWARD_MS, 0, 0))
    worker.loop.sleep(1.8)
    assert worker.device.code is None
    worker.loop.sleep(0.4)
    assert worker.devices.started[0].code == -9


def test_an_urgent_batch_has_its_own_time_limit(start_pool: StartPool) -> None:
    worker = start_pool()
    bulk = worker.receive_each("bulk", priority=9)
    worker.works()
    live = worker.receive_each("live", task=LIMITED)
    worker.works()
    worker.loop.sleep(60)
    assert worker.device.code is None
    worker.device.say(Began(worker.device.works[1].id))
    worker.loop.sleep(5.1)
    assert worker.devices.started[0].code == -9
    # Nobody knows which of them it was: each runs alone.
    worker.work_off()
    assert worker.results([*bulk, *live]) == ["bulk", "live"]


def test_jobs_that_cannot_make_their_deadline_fail_before_they_cost_anything(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHERY_SHED_LATE", "true")
    worker = start_pool()
    worker.receive_each("runs")
    assert worker.works() == [["runs"]]
    (late,) = worker.receive_each("late", batchery_deadline=time.time() + 1)
    (good,) = worker.receive_each("good", batchery_deadline=time.time() + 60)
    worker.loop.sleep(0.9)
    assert worker.info()["waiting"] == 2
    # Nothing else happens, and the device is still busy.
    worker.loop.sleep(0.3)
    with pytest.raises(DeadlineExceeded, match=r"was not begun: its deadline was .* s ago"):
        worker.result(late.id)
    worker.work_off()
    assert worker.result(good.id) == "good"
    assert worker.works() == [["runs"], ["good"]]
    assert worker.info()["batches"]["shed_jobs"] == 1


def test_without_shedding_a_late_job_runs_all_the_same(start_pool: StartPool) -> None:
    worker = start_pool()
    (late,) = worker.receive_each("late", batchery_deadline=time.time() - 9)
    worker.work_off()
    assert worker.result(late.id) == "late"


def test_worker_without_devices_exits_with_code_of_a_failed_start(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    (job,) = worker.receive_each("kill")
    worker.devices.has_room = False
    worker.loop.settle()
    worker.work_off()
    worker.loop.sleep(60)
    assert worker_state.should_stop == 2
    assert not job.acknowledged


# What a device answers


def test_committed_job_is_reported_and_not_acknowledged_again(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.channel.lease_store = FakeLeaseStore()
    committed, fenced, plain = worker.receive_each("committed", "fenced", "plain")
    worker.loop.settle()
    worker.device.answer(
        ("committed", ("'shown'",)), ("fenced", ()), ("needs tracer", ("value", "plain"))
    )
    assert worker.result(plain.id) == "plain"
    worker.settled(committed, fenced, plain)
    assert worker.channel.acknowledged == ["3"]
    assert committed.id in worker_state.successful_requests
    assert fenced.id not in worker_state.successful_requests
    assert not worker_state.active_requests
    assert not worker_state.reserved_requests


def test_the_facts_of_a_batch_are_stored_and_counted(start_pool: StartPool) -> None:
    worker = start_pool()
    (first,) = worker.receive_each(1, task=PATIENT)
    worker.loop.sleep(0.1)
    (second,) = worker.receive_each(2, task=PATIENT)
    worker.loop.sleep(0.15)
    worker.work_off()
    worker.settled(first, second)
    info = [app.backend.get_task_meta(job.id)["batch"] for job in (first, second)]
    assert [each["waited_ms"] for each in info] == [250.0, 150.0]
    assert [(each["size"], each["device"]) for each in info] == [(2, "cpu")] * 2
    batches = worker.info()["batches"]
    assert (batches["batches"], batches["jobs"], batches["mean_batch_size"]) == (1, 2, 2.0)
    assert (batches["mean_waited_ms"], batches["mean_forward_ms"]) == (200.0, FORWARD_MS)


def test_an_answer_for_too_few_jobs_loses_none_of_them(start_pool: StartPool) -> None:
    worker = start_pool()
    jobs = worker.receive_each("a", "b")
    worker.loop.settle()
    worker.device.answer(("needs tracer", ("value", "a")))
    worker.work_off()
    assert worker.results(jobs) == ["a", "b"]
