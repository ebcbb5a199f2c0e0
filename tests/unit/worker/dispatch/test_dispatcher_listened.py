"""What listens to a job, seen from the pool: called once, whatever becomes of the batch."""

import pytest
from celery import signals
from celery.worker import state as worker_state

from apps.batches import FOUR, HOOKED, app, heard
from batchery.tracing import TracedBatch
from batchery_worker import metrics
from batchery_worker.dispatch.dispatcher import MAX_HELD_UP_S
from support.fake_worker import FakeLeaseStore, FakeWorker, StartPool


@pytest.fixture
def worker(start_pool: StartPool) -> FakeWorker:
    heard.clear()
    return start_pool()


def test_hooks_come_before_the_batch_leaves_and_after_it_is_committed(worker: FakeWorker) -> None:
    worker.channel.lease_store = FakeLeaseStore()
    job = worker.receive("word", task=HOOKED)
    assert worker.works() == [["word"]]
    assert heard == [("before_start", "word")]
    worker.device.answer(("committed", (None, "value", "WORD")))
    worker.loop.until(lambda: job.id in worker_state.successful_requests, "settled")
    assert heard[1:] == [("on_success", "WORD")]
    # The device has acknowledged it.
    assert worker.channel.acknowledged == []
    assert worker.info()["batches"]["committed_jobs"] == 1


def test_hook_comes_once_if_the_tracer_completes_the_job(worker: FakeWorker) -> None:
    job = worker.receive("word", task=HOOKED)
    worker.work_off()
    assert worker.result(job.id) == "word"
    worker.settled(job)
    assert heard == [("before_start", "word"), ("on_success", "word")]


def test_hook_comes_once_if_the_device_dies_and_the_job_runs_again(worker: FakeWorker) -> None:
    job = worker.receive("word", task=HOOKED)
    worker.loop.settle()
    worker.device.die()
    worker.work_off()
    assert worker.result(job.id) == "word"
    assert heard.count(("before_start", "word")) == 1


def test_job_that_before_start_refuses_never_leaves(worker: FakeWorker) -> None:
    refused, mate = worker.receive_each("refuse", "mate", task=HOOKED)
    assert worker.works() == [["mate"]]
    with pytest.raises(LookupError, match="refused"):
        worker.result(refused.id)
    worker.work_off()
    assert worker.result(mate.id) == "mate"
    assert heard == [("before_start", "refuse"), ("before_start", "mate"), ("on_success", "mate")]


def test_hook_that_raises_what_ends_a_worker_ends_neither_it_nor_its_job(
    worker: FakeWorker,
) -> None:
    worker.channel.lease_store = FakeLeaseStore()
    jobs = worker.receive_each("exit", "mate", task=HOOKED)
    worker.loop.settle()
    worker.device.answer(*(("committed", (None, "value", word)) for word in ("exit", "mate")))
    for job in jobs:
        worker.loop.until(lambda: job.id in worker_state.successful_requests, "settled")  # noqa: B023
    assert heard[2:] == [("on_success", "exit"), ("on_success", "mate")]


def test_result_of_a_job_whose_device_died_after_the_commit_is_read(worker: FakeWorker) -> None:
    store = worker.channel.lease_store = FakeLeaseStore()
    job = worker.receive("word", task=HOOKED)
    worker.loop.settle()
    app.backend.store_result(job.id, "WORD", "SUCCESS")
    store.held.clear()
    worker.device.die()
    worker.loop.until(lambda: job.id in worker_state.successful_requests, "settled")
    assert heard == [("before_start", "word"), ("on_success", "WORD")]


def test_log_says_once_for_each_task_that_its_receivers_hold_up_the_loop(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    slow_s = MAX_HELD_UP_S

    def receive(**_: object) -> None:
        worker.loop.clock.now_s += slow_s

    signals.task_prerun.connect(receive)
    worker.receive("a", task=FOUR)
    worker.work_off()
    assert "took" not in caplog.text
    slow_s = 1.5
    for task in (FOUR, FOUR, HOOKED):
        worker.receive_each("a", "b", task=task)
        worker.work_off()
    warnings = [message for message in caplog.messages if "took 3.0 s for 2 jobs" in message]
    assert [FOUR in each for each in warnings] == [True, False]


class Tracing:
    """Somebody who traces, and may fail at it."""

    def __init__(self) -> None:
        self.batches: list[TracedBatch] = []
        self.is_broken = False

    def batch(self, traced: TracedBatch) -> None:
        self.batches.append(traced)
        if self.is_broken:
            raise LookupError("no exporter")

    def before(self, *_: object) -> None:
        """Is of no matter here."""


def test_batch_is_traced_with_its_jobs_and_how_it_ended(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = Tracing()
    monkeypatch.setattr(metrics, "current_tracing", lambda: tracing)
    jobs = worker.receive_each("a", "b", task=FOUR)
    worker.works()
    worker.loop.sleep(0.5)
    worker.device.answer()
    worker.loop.settle()
    (traced,) = tracing.batches
    assert (traced.task, traced.duration_s, traced.error) == (FOUR, 0.5, "")
    assert [job.headers["id"] for job in traced.jobs] == [job.id for job in jobs]
    assert [job.context for job in traced.jobs] == [None, None]
    tracing.is_broken = True
    worker.receive("word", task=HOOKED)
    worker.works()
    worker.device.die()
    worker.loop.settle()
    assert "died" in tracing.batches[1].error
    # What its hooks share is that of the trace as well.
    assert tracing.batches[1].jobs[0].context is not None
    assert "cannot be traced" in caplog.text
