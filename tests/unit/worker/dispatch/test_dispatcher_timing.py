"""When batches leave, by what is known of how long others take."""

import time

import pytest

from apps.batches import FOUR, LIMITED
from batchery import DeadlineExceeded
from batchery_worker.dispatch import dispatcher
from support.fake_worker import FakeWorker, StartPool

#: Priorities of the lowest and the highest class.
LOW, HIGH = 9, 0


def learn(worker: FakeWorker, task: str, items: int, took_s: float) -> None:
    """Lets a batch run, so that it is known how long such batches take."""
    worker.receive_each(*["learned"] * items, task=task, priority=LOW)
    worker.works()
    worker.loop.sleep(took_s)
    worker.device.answer()
    worker.loop.settle()


def new_works(worker: FakeWorker) -> list[list[object]]:
    """The batches that a device has got, but for those from which it has learned."""
    return [work for work in worker.works() if "learned" not in work]


# Between the passes of what runs


def test_live_job_waits_for_a_batch_that_is_almost_done(start_pool: StartPool) -> None:
    worker = start_pool()
    learn(worker, LIMITED, items=4, took_s=0.2)
    learn(worker, FOUR, items=1, took_s=0.01)
    worker.receive_each("b1", "b2", "b3", "b4", task=LIMITED, priority=LOW)
    worker.loop.sleep(0.15)
    worker.receive_each("live", priority=HIGH)
    # Its own pass takes a fifth of the 50 ms that are left: too much for what it saves.
    assert new_works(worker) == [["b1", "b2", "b3", "b4"]]


def test_live_job_goes_before_the_rest_of_a_batch_that_takes_ten_times_as_long(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    learn(worker, LIMITED, items=4, took_s=0.2)
    learn(worker, FOUR, items=1, took_s=0.01)
    worker.receive_each("b1", "b2", "b3", "b4", task=LIMITED, priority=LOW)
    worker.loop.sleep(0.05)
    worker.receive_each("live", priority=HIGH)
    assert new_works(worker)[1:] == [["live"]]


def test_batch_that_only_waits_on_the_device_counts_with_all_of_its_time(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    learn(worker, LIMITED, items=4, took_s=0.2)
    learn(worker, FOUR, items=1, took_s=0.01)
    worker.receive_each(*range(8), task=LIMITED, priority=LOW)
    worker.loop.sleep(0.16)
    assert new_works(worker) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    worker.receive_each("live", priority=HIGH)
    assert new_works(worker)[2:] == [["live"]]


def test_batch_of_which_nothing_is_known_may_take_for_ever(start_pool: StartPool) -> None:
    worker = start_pool()
    learn(worker, FOUR, items=1, took_s=0.01)
    worker.receive_each("b1", "b2", task=LIMITED, priority=LOW)
    worker.loop.sleep(4.0)
    worker.receive_each("live", priority=HIGH)
    assert new_works(worker)[1:] == [["live"]]


# What a batch has


def test_batch_has_the_keywords_of_its_jobs(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive_each("a", "b", kwargs={"tag": "x"})
    worker.works()
    worker.device.answer()
    worker.receive_each("c")
    worker.works()
    assert [work.keywords for work in worker.device.works] == [{"tag": "x"}, {}]


# The batch behind


def test_next_batch_is_due_by_when_the_one_before_began_and_not_by_when_it_was_sent(
    start_pool: StartPool,
) -> None:
    worker = start_pool()
    learn(worker, FOUR, items=4, took_s=2.0)
    worker.receive_each(*range(12))
    worker.loop.sleep(1.5)
    assert len(new_works(worker)) == 2
    worker.loop.sleep(0.5)
    worker.device.answer()
    # The second began now, and was sent half a second ago.
    worker.loop.sleep(1.4)
    assert len(new_works(worker)) == 2
    worker.loop.sleep(0.1)
    assert len(new_works(worker)) == 3


def test_batch_goes_behind_the_one_that_began_first_whenever_that_was_sent(
    start_pool: StartPool,
) -> None:
    worker = start_pool("cuda:0", "cuda:1")
    first, second = worker.devices.started
    for item in ("a", "b"):
        worker.receive_each(item)
        worker.loop.sleep(0.1)
    worker.receive_each(1, 2, 3, 4)
    assert worker.works(first) == [["a"], [1, 2, 3, 4]]
    second.answer()
    worker.receive_each("c")
    worker.loop.sleep(0.1)
    # What was sent before `c` begins after it.
    first.answer()
    worker.loop.sleep(0.1)
    worker.receive_each(5, 6, 7, 8)
    assert worker.works(second) == [["b"], ["c"], [5, 6, 7, 8]]


# Classes


@pytest.mark.parametrize(
    ("order", "expected"),
    [("strict", {"h0", "h1", "h2", "h3"}), ("shares", {"h0", "h1", "h2", "l0"})],
)
def test_classes_share_a_batch_or_the_highest_one_has_it(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, order: str, expected: set[str]
) -> None:
    monkeypatch.setenv("BATCHERY_CLASS_ORDER", order)
    worker = start_pool()
    worker.receive_each("l0", "l1", "l2", "l3", priority=LOW)
    worker.receive_each("h0", "h1", "h2", "h3", priority=HIGH)
    assert set(worker.works()[0]) == expected


# Deadlines


def test_late_job_is_told_how_late_it_is(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHERY_SHED_LATE", "true")
    worker = start_pool()
    worker.receive_each("runs")
    worker.works()
    (late,) = worker.receive_each("late", batchery_deadline=time.time() + 1)
    worker.loop.sleep(1.2)
    with pytest.raises(DeadlineExceeded, match=r"its deadline was 0\.0\d\d s ago"):
        worker.result(late.id)


def test_job_that_would_be_late_is_told_how_soon_its_deadline_is(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHERY_SHED_LATE", "true")
    worker = start_pool()
    for _ in range(20):
        learn(worker, FOUR, items=4, took_s=2.0)
    (late,) = worker.receive_each("late", batchery_deadline=time.time() + 0.5)
    with pytest.raises(DeadlineExceeded, match=r"its deadline is in only 0\.[45]\d\d s"):
        worker.result(late.id)


def test_jobs_that_would_be_late_in_their_batch_are_told_with_nothing_else_to_do(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHERY_SHED_LATE", "true")
    worker = start_pool()
    for _ in range(20):
        learn(worker, FOUR, items=4, took_s=2.0)
    # Alone on the device, each of them would make it.
    deadline = time.time() + 1.2
    late = worker.receive_each(*["late"] * 4, task=FOUR, batchery_deadline=deadline)
    assert new_works(worker) == []
    for each in late:
        with pytest.raises(DeadlineExceeded, match=r"its deadline is in only 1\.[12]\d\d s"):
            worker.result(each.id)


@pytest.mark.parametrize(("target_ms", "lines"), [("100", 1), ("60000", 0), (None, 0)])
def test_log_says_once_that_a_target_cannot_be_kept(
    start_pool: StartPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target_ms: str | None,
    lines: int,
) -> None:
    if target_ms is not None:
        monkeypatch.setenv("BATCHERY_TARGET_LATENCY_MS", target_ms)
    worker = start_pool()
    for _ in range(20):
        learn(worker, FOUR, items=1, took_s=2.0)
    warnings = [message for message in caplog.messages if "cannot be kept" in message]
    assert len(warnings) == lines
    assert all("_ms = 100 cannot" in each for each in warnings)
    assert all("one item alone takes 2000" in each for each in warnings)


def test_jobs_that_come_one_by_one_wake_the_loop_once(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[object] = []
    monkeypatch.setattr(dispatcher, "begin_next_turn", woken.append)
    worker = start_pool()
    worker.receive_each(*range(8))
    assert woken == [worker.loop]
    worker.work_off()
    worker.receive_each(8)
    assert woken == [worker.loop] * 2
