"""What a restart of the devices does to jobs, and ordinary jobs beside those of batches."""

import pytest
from celery.app import trace
from celery.backends.cache import CacheBackend
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import BackendStoreError, TaskRevokedError
from celery.worker import state as worker_state

from apps.batches import double, late
from batchery_worker.completion.ordinary import OrdinaryThreads
from batchery_worker.device_pool.supervisor import MAX_FAILED_STARTS
from batchery_worker.pool import OrdinaryAutoscaler
from support.fake_worker import StartPool


def test_fresh_processes_lose_no_job(start_pool: StartPool) -> None:
    worker = start_pool()
    (running,) = worker.receive_each("runs")
    worker.loop.settle()
    worker.pool.restart()
    (waiting,) = worker.receive_each("waits")
    assert worker.works() == [["runs"]]
    worker.work_off()
    old, new = worker.devices.started
    assert (old.works[1:], old.code) == ([], 0)
    assert worker.works(new) == [["waits"]]
    assert worker.results([running, waiting]) == ["runs", "waits"]
    assert worker.info()["batches"]["device_restarts"] == 0


def test_a_device_that_does_not_leave_is_replaced_also_after_a_reconnect(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    worker.device.hangs = True
    worker.pool.restart()
    worker.loop.sleep(1)
    worker.reconnect()
    (job,) = worker.receive_each("waits")
    worker.loop.sleep(10)
    assert [device.code for device in worker.devices.started] == [-9, None]
    worker.work_off()
    assert worker.result(job.id) == "waits"


def test_a_device_whose_neighbour_is_given_up_still_gets_fresh_code(
    start_pool: StartPool,
) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    worker.devices.get_ready = False
    second.die()
    worker.loop.settle()
    worker.pool.restart()
    for _ in range(MAX_FAILED_STARTS):
        worker.loop.sleep(5)
        # Not while its neighbour may come back, and it is the only one.
        assert first.poll() is None
        worker.device.die(1)
    worker.devices.get_ready = True
    worker.work_off()
    assert first.code == 0
    states = {name: each["state"] for name, each in worker.info()["devices"].items()}
    assert states == {"cuda:0": "ready", "cuda:1": "given up"}


def test_a_batch_that_the_pipe_cannot_take_at_once_arrives_whole(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive_each("x" * 5_000_000)
    worker.loop.until(worker.device.hear, "it has arrived")
    assert worker.works() == [["x" * 5_000_000]]


def test_an_ordinary_task_runs_beside_on_a_thread(start_pool: StartPool) -> None:
    worker = start_pool()
    ordinary = worker.receive(21, task=double.name)
    assert worker.result(ordinary.id) == 42
    assert worker.works() == []


def test_an_ordinary_job_whose_result_finds_no_backend_is_given_back(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> None:
        raise BackendStoreError("as told") from ConnectionError("away")

    monkeypatch.setattr(CacheBackend, "store_result", cut_off)
    monkeypatch.setattr(CacheBackend, "exception_safe_to_retry", lambda *_: True)
    worker = start_pool()
    ordinary = worker.receive(21, task=late.name)
    worker.loop.until(lambda: worker.channel.rejected, "it is given back")
    assert worker.channel.rejected == [(ordinary.message.delivery_tag, True)]
    assert ordinary not in worker_state.active_requests


def test_an_ordinary_job_whose_on_failure_is_broken_fails_and_does_not_run_again(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend raises the same while it is away."""

    def break_off(*_: object) -> None:
        raise OSError("as told")

    monkeypatch.setattr(late, "on_failure", break_off)
    # Celery's fast tracer, which workers have, does not catch what a hook raises.
    monkeypatch.setattr(trace, "report_internal_error", break_off)
    monkeypatch.setattr(CacheBackend, "exception_safe_to_retry", lambda *_: True)
    worker = start_pool()
    ordinary = worker.receive(-1, task=late.name)
    worker.loop.until(lambda: ordinary.acknowledged, "it has failed")
    assert worker.channel.rejected == []
    assert ordinary not in worker_state.active_requests
    assert isinstance(late.AsyncResult(ordinary.id).result, OSError)


def test_a_suspect_beside_a_solo_pool_can_be_terminated(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrdinaryThreads, "terminate_job", SoloPool.terminate_job)
    worker = start_pool()
    suspect, mate = worker.receive_each("suspect", "mate")
    worker.loop.settle()
    worker.device.die()
    worker.loop.sleep(1.0)
    assert worker.works() == [["suspect"]]
    # Celery knows the process that has died.
    suspect.terminate(worker.pool)
    worker.work_off()
    with pytest.raises(TaskRevokedError):
        worker.result(suspect.id)
    assert worker.result(mate.id) == "mate"


def test_jobs_that_wait_for_devices_need_no_processes(start_pool: StartPool) -> None:
    worker = start_pool()
    scaler = OrdinaryAutoscaler(worker.pool, 10, 1, worker=worker)
    before = scaler.qty
    worker.receive_each(*"abcdefgh")
    worker.loop.settle()
    assert scaler.qty == before
    ordinary = worker.receive(21, task=double.name)
    assert scaler.qty == before + (ordinary in worker_state.reserved_requests)
    worker.work_off()
    assert worker.result(ordinary.id) == 42
