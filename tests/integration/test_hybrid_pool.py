"""Ordinary tasks keep Celery's processes, limits and growth; batch tasks run on devices beside."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from apps import hybrid
from apps.ledger import executions
from conftest import StartWorker
from support.answers import Answers
from support.harness import Worker, unsettled, wait_ended, wait_for
from support.patience import TIMEOUT_S, patient

BOTH = ("-Q", "celery,devices")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> Iterator[None]:
    hybrid.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    yield
    with hybrid.app.connection_for_read() as connection:
        hybrid.app.control.purge(connection)


def processes(worker: Worker) -> list[int]:
    """Process ids of the ordinary pool."""
    found: list[int] = worker.inspect(hybrid.app, "stats")["pool"]["processes"]
    return found


def test_ordinary_tasks_run_in_processes_and_batches_on_devices(start_worker: StartWorker) -> None:
    worker = start_worker("apps.hybrid", "-c", "2", *BOTH)
    seen: set[int] = set()

    def both_ran() -> bool:
        jobs = [hybrid.pid.delay(0.2) for _ in range(4)]
        doubled = hybrid.double.submit_many(range(100)).get(timeout=TIMEOUT_S)
        assert doubled == [2 * number for number in range(100)]
        seen.update(job.get(timeout=TIMEOUT_S) for job in jobs)
        return len(seen) == 2

    wait_for(both_ran, "both processes have run jobs")
    assert seen == set(processes(worker))
    (device,) = worker.devices()
    assert device.pid not in processes(worker)
    assert worker.stop() == 0


def test_an_ordinary_job_without_memory_ends_its_worker_and_no_batch_job_is_lost(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    """As with Celery: its worker ends by itself, and nobody kills it."""
    worker = start_worker("apps.hybrid", "-c", "1", *BOTH)
    options = {"book": str(tmp_path / "book"), "gate": str(tmp_path / "gate")}
    with Answers(redis_url) as answers:
        jobs = [hybrid.gated.delay(number, **options) for number in range(20)]
        wait_for(lambda: executions(tmp_path / "book"), "a batch runs")
        family = psutil.Process(worker.pid).children(recursive=True)
        assert worker.devices()
        hybrid.exhausted.delay()
        wait_for(lambda: "Process got: full" in worker.log, "the worker ends")
        (tmp_path / "gate").touch()
        assert worker.wait_exit() == 1, worker.log
        wait_ended(family)
        start_worker("apps.hybrid", "-c", "1", *BOTH)
        assert [job.get(timeout=TIMEOUT_S) for job in jobs] == list(range(20))
        assert [answers.states(job.id) for job in jobs] == [{"SUCCESS": 1}] * 20
    wait_for(lambda: not unsettled(redis_url), "none is left")


def test_children_forked_beside_busy_threads_of_ours_run_every_job(
    start_worker: StartWorker,
) -> None:
    """Each ordinary job costs a fork, while threads complete batch jobs that have callbacks."""
    start_worker("apps.hybrid", "-c", "8", "--max-tasks-per-child", "1", *BOTH)
    callback = hybrid.add.s(1).set(queue="nobody")
    batch = [hybrid.double.apply_async((number,), link=callback) for number in range(200)]
    ordinary = [hybrid.pid.delay() for _ in range(20)]
    pids = [job.get(timeout=patient(150)) for job in ordinary]
    assert len(set(pids)) > 10
    assert [job.get(timeout=patient(150)) for job in batch] == [2 * number for number in range(200)]


def test_pool_grows_and_shrinks_by_remote_control(start_worker: StartWorker) -> None:
    worker = start_worker("apps.hybrid", "-c", "1", *BOTH)
    # Once it has answered, it hears commands that ask for no answer.
    assert len(processes(worker)) == 1
    hybrid.app.control.pool_grow(2, destination=[worker.name])
    wait_for(lambda: len(processes(worker)) == 3, "three processes")
    hybrid.app.control.pool_shrink(1, destination=[worker.name])
    wait_for(lambda: len(processes(worker)) == 2, "two processes")
    assert hybrid.double.delay(4).get(timeout=TIMEOUT_S) == 8


def test_autoscale_starts_processes_for_waiting_jobs(start_worker: StartWorker) -> None:
    worker = start_worker("apps.hybrid", "--autoscale", "3,1", *BOTH)
    (device,) = worker.devices()
    device.suspend()
    held = hybrid.double.submit_many(range(4))
    # Jobs that wait for a device want no process.
    assert worker.inspect(hybrid.app, "stats")["autoscaler"]["qty"] == 0
    device.resume()
    assert held.get(timeout=TIMEOUT_S) == [0, 2, 4, 6]
    jobs = [hybrid.pid.delay(2.0) for _ in range(9)]
    wait_for(lambda: len(processes(worker)) > 1, "more processes")
    assert hybrid.double.delay(4).get(timeout=TIMEOUT_S) == 8
    assert len({job.get(timeout=TIMEOUT_S) for job in jobs}) > 1


def test_worker_of_other_queues_starts_no_device(start_worker: StartWorker) -> None:
    worker = start_worker("apps.hybrid", "-c", "2", "-Q", "celery")
    assert hybrid.pid.delay().get(timeout=TIMEOUT_S) in processes(worker)
    assert worker.devices() == []
    stats = worker.inspect(hybrid.app, "stats")
    assert stats["pool"]["implementation"] == "celery.concurrency.prefork:TaskPool"
    assert stats["prefetch_count"] == 2 * 4


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_other_pools_have_devices_beside_them(start_worker: StartWorker, pool: str) -> None:
    worker = start_worker("apps.hybrid", "-P", pool, "-c", "2", *BOTH)
    doubled = hybrid.double.submit_many(range(40)).get(timeout=TIMEOUT_S)
    assert doubled == [2 * number for number in range(40)]
    assert len(worker.devices()) == 1
    assert hybrid.pid.delay().get(timeout=TIMEOUT_S) == worker.pid
    assert worker.stop() == 0
