"""What a reconnect and the end of a worker do to its jobs."""

import pytest
from celery.exceptions import TaskRevokedError
from celery.worker import state as worker_state

from apps.batches import LIMITED, PATIENT, app
from batchery_worker.device_pool.supervisor import MAX_STEP_S
from support.fake_worker import StartPool


def test_after_a_reconnect_what_runs_goes_on_and_what_waits_comes_again(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    (running,) = worker.receive_each("runs")
    worker.loop.settle()
    (waiting,) = worker.receive_each("waits")
    worker.loop.settle()
    worker.reconnect()
    again = [
        worker.receive(item, id=job.id, redelivered=True)
        for item, job in (("runs", running), ("waits", waiting))
    ]
    assert worker.works() == [["runs"]]
    worker.work_off()
    assert worker.works() == [["runs"], ["waits"]]
    assert worker.results(again) == ["runs", "waits"]
    worker.settled(*again)
    assert sorted(worker.channel.acknowledged) == ["3", "4"]


def test_a_reconnect_does_not_give_a_job_its_time_limit_anew(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive_each("slow", "other", task=LIMITED)
    worker.loop.sleep(4)
    worker.reconnect()
    worker.loop.sleep(1)
    assert worker.devices.started[0].code == -9
    worker.loop.sleep(1)
    assert worker.works() == [["slow"]]


def test_a_suspect_survives_a_reconnect(start_pool: StartPool) -> None:
    worker = start_pool()
    jobs = worker.receive_each("a", "b")
    worker.loop.settle()
    worker.device.die()
    worker.loop.settle()
    worker.reconnect()
    worker.work_off()
    assert worker.results(jobs) == ["a", "b"]


def test_a_batch_that_waits_for_company_still_leaves_after_a_reconnect(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.receive_each("dropped", task=PATIENT)
    worker.loop.settle()
    worker.reconnect()
    worker.receive_each("new", task=PATIENT)
    worker.loop.sleep(0.25)
    assert worker.works() == [["new"]]


def test_a_warm_shutdown_finishes_what_is_on_a_device_and_nothing_else(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    (running,) = worker.receive_each("runs")
    worker.loop.settle()
    (waiting,) = worker.receive_each("waits")
    worker.loop.settle()
    worker.device.answer()
    worker.pool.stop()
    assert app.AsyncResult(running.id).get(timeout=1) == "runs"
    assert running.acknowledged
    assert not waiting.acknowledged
    assert worker.device.works[1:] == []
    assert (len(worker.devices.started), worker.device.code) == (1, 0)


def test_a_device_that_dies_during_a_warm_shutdown_is_not_replaced(start_pool: StartPool) -> None:
    worker = start_pool()
    (running,) = worker.receive_each("runs")
    worker.loop.settle()
    worker.device.die()
    worker.pool.stop()
    assert not running.acknowledged
    assert len(worker.devices.started) == 1


def test_a_cold_shutdown_waits_for_nothing(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_pool()
    (running,) = worker.receive_each("runs")
    worker.loop.settle()
    worker.device.hangs = True
    monkeypatch.setattr(worker_state, "should_terminate", 0)
    worker.pool.stop()
    assert not running.acknowledged
    assert worker.device.code == -9


def test_what_was_answered_is_settled_while_the_loop_is_held_up(start_pool: StartPool) -> None:
    worker = start_pool()
    answered, mate = worker.receive_each("answered", "mate")
    worker.loop.settle()
    worker.device.answer()
    # Celery asks at the end of a soft shutdown, and cancels the rest.
    for request in (answered, mate):
        request.cancel(worker.pool)
    assert worker.results([answered, mate]) == ["answered", "mate"]
    assert sorted(worker.channel.acknowledged) == ["1", "2"]


def test_a_device_is_killed_that_does_not_end_a_batch_whose_jobs_were_all_terminated(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    first, second = worker.receive_each("hangs", "hangs, too")
    worker.loop.settle()
    behind = worker.receive_each(*"abcd")
    worker.loop.settle()
    first.terminate(worker.pool, "TERM")
    worker.loop.sleep(MAX_STEP_S + 1.0)
    assert worker.device.code is None, "the other job of the batch is wanted"
    assert worker.info()["devices"]["cpu"]["oldest_batch_s"] == pytest.approx(MAX_STEP_S + 1.0)
    second.terminate(worker.pool, "TERM")
    worker.loop.sleep(MAX_STEP_S - 1.0)
    assert worker.device.code is None
    worker.loop.sleep(2.0)
    assert worker.devices.started[0].code == -9
    worker.work_off()
    assert worker.results(behind) == [*"abcd"]
    assert all("hangs" not in work for work in worker.works())
    for job in (first, second):
        with pytest.raises(TaskRevokedError):
            worker.result(job.id)


def test_a_terminated_batch_that_ends_in_time_costs_no_process(start_pool: StartPool) -> None:
    worker = start_pool()
    (job,) = worker.receive_each("ends")
    worker.loop.settle()
    job.terminate(worker.pool, "TERM")
    worker.device.answer()
    worker.loop.sleep(MAX_STEP_S * 2)
    assert worker.device.code is None
    assert len(worker.devices.started) == 1
    assert worker.info()["devices"]["cpu"]["oldest_batch_s"] == 0
