"""Devices that have not loaded all models: who gets which batch, and the time that loads take."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from celery.exceptions import TimeLimitExceeded
from celery.worker import state as worker_state

from apps.batches import FOUR, LIMITED
from batchery_worker.device_pool.supervisor import MAX_FAILED_STARTS
from batchery_worker.ipc.messages import Loaded, Loads, Ready, Work
from support.fake_devices import FakeDevice
from support.fake_worker import FakeWorker, StartPool

#: As the setting `max_pass_s`, in the tests.
LIMIT_S = 10.0

LOAD_S = 60.0


def start(start_pool: StartPool, *states: dict[str, float]) -> FakeWorker:
    """A worker whose devices have said how long it takes until they have each model."""
    names = [f"cpu:{number}" for number in range(len(states))]
    worker = start_pool(*names, model_memory_bytes=1, max_pass_s=LIMIT_S)
    for device, loads_s in zip(worker.devices.started, states, strict=True):
        say_ready(device, loads_s)
    worker.loop.settle()
    return worker


def say_ready(device: FakeDevice, loads_s: dict[str, float]) -> None:
    models = {name: {"reload_s": load_s} for name, load_s in loads_s.items()}
    device.say(Ready(device.pid, 0.5, {"models": models}))


def last_work(worker: FakeWorker, device: int = 0) -> Work:
    worker.loop.settle()
    return worker.devices.started[device].hear()[-1]


def test_batch_goes_to_the_device_that_has_its_model(start_pool: StartPool) -> None:
    worker = start(start_pool, {FOUR: LOAD_S}, {FOUR: 0.0})
    cold, warm = worker.devices.started
    worker.receive_each("a", "b")
    assert (worker.works(cold), worker.works(warm)) == ([], [["a", "b"]])
    worker.receive("c")
    worker.loop.sleep(LOAD_S - 1.0)
    assert worker.works(cold) == []


def test_device_loads_a_model_when_its_jobs_have_waited_for_as_long_as_that_takes(
    start_pool: StartPool,
) -> None:
    worker = start(start_pool, {FOUR: 5.0}, {FOUR: 0.0})
    cold, warm = worker.devices.started
    worker.receive("a")
    assert worker.works(warm) == [["a"]]
    worker.receive("b")
    worker.loop.sleep(4.9)
    assert worker.works(cold) == []
    # Nothing else happens that would wake the worker.
    worker.loop.sleep(0.2)
    assert worker.works(cold) == [["b"]]


def test_device_is_told_for_which_models_jobs_wait_when_it_must_load_one(
    start_pool: StartPool,
) -> None:
    worker = start(start_pool, {FOUR: LOAD_S, LIMITED: 0.0})
    worker.receive("a")
    assert last_work(worker).wanted == frozenset()
    worker.receive("b", task=LIMITED)
    worker.receive("c", task=LIMITED)
    assert worker.works() == [["a"]]
    worker.device.answer()
    assert last_work(worker).wanted == frozenset()


def test_load_is_no_pass_that_hangs_and_counts_for_no_time_limit(start_pool: StartPool) -> None:
    worker = start(start_pool, {LIMITED: LOAD_S})
    request = worker.receive("a", task=LIMITED)
    work = last_work(worker)
    worker.device.say(Loads(work.id, LOAD_S))
    worker.loop.sleep(5 * LIMIT_S)
    worker.device.say(Loaded(work.id))
    worker.loop.sleep(4.0)
    assert worker.device.code is None
    worker.device.answer()
    assert worker.result(request.id) == "a"


def test_load_is_charged_to_those_who_needed_it(start_pool: StartPool) -> None:
    worker = start(start_pool, {FOUR: LOAD_S})
    scheduler: Any = getattr(worker.pool, "_dispatcher")._scheduler  # noqa: B009 - private
    worker.receive("a")
    work = last_work(worker)
    with patch.object(scheduler, "ended", wraps=scheduler.ended) as ended:
        worker.device.say(Loads(work.id, LOAD_S / 2))
        worker.loop.sleep(LOAD_S)
        worker.device.say(Loaded(work.id))
        worker.loop.settle()
        worker.loop.sleep(1.0)
        worker.work_off()
        worker.receive("b")
        worker.work_off()
    assert [call.args[2] for call in ended.call_args_list] == [LOAD_S, 0.0]


def test_time_limit_counts_from_the_end_of_a_load(start_pool: StartPool) -> None:
    worker = start(start_pool, {LIMITED: LOAD_S})
    request = worker.receive("a", task=LIMITED)
    work = last_work(worker)
    device = worker.device
    device.say(Loads(work.id, LOAD_S))
    worker.loop.sleep(LIMIT_S)
    device.say(Loaded(work.id))
    worker.loop.sleep(4.0)
    assert device.code is None
    worker.loop.sleep(2.0)
    assert device.code == -9
    worker.loop.sleep(1.0)
    # Alone, it does so again.
    worker.loop.sleep(6.0)
    with pytest.raises(TimeLimitExceeded):
        worker.result(request.id)


@pytest.mark.parametrize("limit_s", [LIMIT_S, None])
@pytest.mark.parametrize("task", [FOUR, LIMITED])
def test_load_that_hangs_has_as_much_time_as_a_start(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture, task: str, limit_s: float | None
) -> None:
    worker = start_pool(max_pass_s=limit_s)
    (job,) = worker.receive_each("a", task=task)
    device = worker.device
    device.say(Loads(last_work(worker).id, LOAD_S))
    worker.loop.sleep(300.0)
    # What was planned on the loop before is lost.
    worker.reconnect()
    worker.loop.sleep(299.0)
    assert device.code is None
    worker.loop.sleep(2.0)
    assert device.code == -9
    assert "killed by its worker, as it did not load a model within" in caplog.text
    worker.work_off()
    assert worker.result(job.id) == "a"


def test_device_that_dies_in_a_load_starts_anew_and_its_jobs_run_alone(
    start_pool: StartPool,
) -> None:
    worker = start(start_pool, {FOUR: LOAD_S})
    requests = worker.receive_each("a", "b")
    worker.device.say(Loads(last_work(worker).id, LOAD_S))
    worker.loop.settle()
    worker.devices.get_ready = False
    worker.device.die()
    worker.loop.sleep(1.0)
    say_ready(worker.device, {FOUR: LOAD_S})
    assert worker.works() == [["a"]]
    worker.work_off()
    assert worker.results(requests) == ["a", "b"]


@pytest.mark.parametrize(("models", "exit_code"), [(("a", "b"), 2), (("a", "a"), None)])
def test_worker_ends_when_a_model_has_no_device_left(
    start_pool: StartPool, models: tuple[str, str], exit_code: int | None
) -> None:
    worker = start_pool("cpu:0", "cpu:1")
    for device, name in zip(worker.pool.devices or (), models, strict=True):
        device.setup = replace(device.setup, models={name: "devices"})
    worker.devices.get_ready = False
    worker.device.die()
    for _ in range(MAX_FAILED_STARTS):
        worker.loop.sleep(5.0)
        worker.device.die(1)
    worker.loop.sleep(5.0)
    states = {name: each["state"] for name, each in worker.info()["devices"].items()}
    assert states == {"cpu:0": "ready", "cpu:1": "given up"}
    assert worker_state.should_stop == exit_code
