"""A device that hangs: it is killed, its jobs go on, and at last the worker ends."""

from unittest.mock import patch

import pytest
from celery.worker import state as worker_state

from apps.batches import LIMITED
from batchery_worker.device_pool.supervisor import MAX_HANGS
from batchery_worker.ipc.messages import Loaded, Loads, ResultsWait, Stepped
from support.fake_worker import StartPool

#: As the setting `max_pass_s`, in the tests.
LIMIT_S = 10.0


def test_device_that_gives_no_sign_is_killed_and_its_jobs_run_again(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    (device,) = worker.pool.devices or ()
    worker.receive_each("a", "b")
    worker.loop.sleep(LIMIT_S - 0.5)
    assert (worker.device.code, device.is_hung) == (None, False)
    worker.devices.get_ready = False
    worker.loop.sleep(2.0)
    hung, fresh = worker.devices.started
    assert (hung.code, device.hangs, device.is_hung) == (-9, 1, True)
    assert "device cpu hangs: no sign of it for" in caplog.text
    # Not by the kernel, for memory.
    why = "as it hung for longer than max_pass_s"
    assert f"device process for cpu died: killed by its worker, {why}, with 1 batch" in caplog.text
    fresh.get_ready()
    worker.loop.settle()
    assert not device.is_hung
    # One by one, to find out whether one of them did it.
    assert worker.works() == [["a"]]
    worker.device.answer()
    worker.loop.settle()
    assert (worker.works(), device.hangs) == ([["a"], ["b"]], 0)


def test_idle_device_may_be_silent_for_ever_and_a_batch_takes_its_time_from_its_start(
    start_pool: StartPool,
) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.loop.sleep(100 * LIMIT_S)
    worker.receive("a")
    worker.loop.sleep(LIMIT_S - 1.0)
    assert worker.device.code is None
    worker.device.answer()
    worker.loop.settle()
    worker.loop.sleep(100 * LIMIT_S)
    assert len(worker.devices.started) == 1


def test_each_answer_is_a_sign(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive_each(*range(40))
    for _ in range(10):
        worker.loop.sleep(LIMIT_S - 1.0)
        worker.device.answer()
        worker.loop.settle()
    assert len(worker.devices.started) == 1


def test_time_that_results_wait_for_redis_does_not_count(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive("a")
    worker.loop.settle()
    (work,) = worker.device.hear()
    worker.device.say(ResultsWait(work.id))
    worker.loop.sleep(10 * LIMIT_S)
    assert worker.device.code is None


def test_results_of_a_batch_wait_though_those_of_another_have_come(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive_each(*range(8))
    worker.loop.settle()
    for work in worker.device.hear():
        worker.device.say(ResultsWait(work.id))
    worker.device.answer()
    worker.loop.sleep(10 * LIMIT_S)
    assert worker.device.code is None


def test_a_batch_that_asks_redis_first_may_hang_after_that(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive("a")
    worker.loop.settle()
    (work,) = worker.device.hear()
    assert work.is_timed
    worker.device.say(ResultsWait(work.id))
    worker.loop.sleep(10 * LIMIT_S)
    worker.device.say(ResultsWait(work.id, is_over=True))
    worker.loop.sleep(LIMIT_S - 1.0)
    assert worker.device.code is None
    worker.loop.sleep(3.0)
    assert worker.devices.started[0].code == -9


def test_a_model_may_load_for_long_though_the_batch_before_is_answered(
    start_pool: StartPool,
) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive_each(*range(8))
    worker.loop.settle()
    _, second = worker.device.hear()
    worker.device.say(Loads(second.id, 1.0))
    worker.device.answer()
    worker.loop.sleep(3 * LIMIT_S)
    assert worker.device.code is None
    worker.device.say(Loaded(second.id))
    worker.loop.sleep(LIMIT_S + 3.0)
    assert worker.devices.started[0].code == -9


def test_each_step_of_a_model_with_slots_is_a_sign(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive("a")
    worker.loop.settle()
    for _ in range(10):
        worker.loop.sleep(LIMIT_S - 1.0)
        worker.device.say(Stepped())
        worker.loop.settle()
    assert worker.device.code is None
    worker.loop.sleep(LIMIT_S + 3.0)
    assert worker.devices.started[0].code == -9


def test_steps_of_other_jobs_do_not_count_the_time_that_results_wait(
    start_pool: StartPool,
) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive("a")
    worker.loop.settle()
    (work,) = worker.device.hear()
    worker.device.say(ResultsWait(work.id))
    worker.loop.settle()
    worker.device.say(Stepped())
    worker.loop.sleep(10 * LIMIT_S)
    assert worker.device.code is None


def test_without_a_limit_nothing_is_killed(start_pool: StartPool) -> None:
    worker = start_pool()
    worker.receive("a")
    worker.loop.sleep(1e6)
    assert len(worker.devices.started) == 1


def test_device_that_hangs_again_and_again_ends_the_worker(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    worker.receive_each(*range(8))
    worker.loop.sleep((MAX_HANGS - 0.5) * (LIMIT_S + 1.0))
    assert worker_state.should_stop is None
    worker.loop.sleep(LIMIT_S)
    assert worker_state.should_stop == 2
    assert f"device cpu hung {MAX_HANGS} times in a row: the worker stops" in caplog.text


def test_only_the_event_loop_of_now_looks(start_pool: StartPool) -> None:
    worker = start_pool(max_pass_s=LIMIT_S)
    for _ in range(3):
        # As after each reconnect to the broker.
        worker.pool.register_with_event_loop(worker.loop)
    worker.loop.settle()
    worker.receive("a")
    worker.loop.sleep(LIMIT_S + 3.0)
    assert len(worker.devices.started) == 2


def test_batches_that_have_ended_leave_no_timers_of_their_limits(start_pool: StartPool) -> None:
    worker = start_pool()
    with patch.object(worker.loop, "call_later", wraps=worker.loop.call_later) as call_later:
        for number in range(20):
            worker.receive(number, task=LIMITED)
            worker.work_off()
    assert len(worker.works()) == 20
    assert [call.args[0] for call in call_later.call_args_list if call.args[0] > 4.5] == [5.0]
    # The timer of the first one is there for the last one.
    worker.receive("hangs", task=LIMITED)
    worker.loop.sleep(4.9)
    assert worker.device.code is None
    worker.loop.sleep(0.2)
    assert worker.devices.started[0].code == -9
