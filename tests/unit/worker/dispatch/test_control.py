"""Orders to a worker that runs: other versions of its models, and devices that leave."""

import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from apps.batches import FOUR, app
from batchery import Model, ModelSettings, StepModel, install, register
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery_worker.ipc.messages import NotReady, Ready, Reload, Reloaded
from support.fake_devices import FakeDevice
from support.fake_worker import FakeWorker, StartPool

EMBED, OWN, SLOTS = "embed", "apps.batches.own", "apps.batches.slots"

OLD = ModelSettings(kind="embedding", model="old", queue="celery")


class Own(Model):
    """A model of the app's own."""


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    register(app, OWN, Own, queue="celery")
    yield
    for each in (EMBED, OWN, SLOTS):
        app.tasks.pop(each, None)
    install(app)


def start(start_pool: StartPool, *devices: str) -> FakeWorker:
    return start_pool(*devices, models={EMBED: OLD})


def order(worker: FakeWorker, number: str = "1", task: str = EMBED, **options: Any) -> Any:
    """Orders another version, or asks again; returns how far it is."""
    report = worker.pool.reload(number, task, **options)
    worker.loop.settle()
    return report


def states(report: Any) -> dict[str, str]:
    return {name: each["state"] for name, each in report["devices"].items()}


def reloads(device: FakeDevice) -> list[Reload]:
    device.hear()
    return device.reloads


def kill(worker: FakeWorker, device: FakeDevice) -> FakeDevice:
    """Kills a device; returns the process in its place."""
    device.die()
    worker.loop.sleep(5)
    worker.device.hear()
    return worker.device


def test_a_load_that_hangs_is_given_up_with_its_process(start_pool: StartPool) -> None:
    worker = start(start_pool, "cpu")
    order(worker, model="hangs")
    worker.loop.sleep(get_installation(app).settings.device_start_timeout_s + 1)
    worker.loop.settle()
    report = order(worker)
    assert report["is_over"]
    assert report["devices"]["cpu"]["error"] == "it was not loaded within device_start_timeout_s"
    worker.loop.sleep(5)
    # The fresh process has the old version, and gets the next order.
    assert len(worker.devices.started) == 2
    assert states(order(worker, "2", model="new")) == {"cpu": "loading"}
    assert [each.settings and each.settings.model for each in reloads(worker.device)] == ["new"]


def test_devices_load_a_version_one_after_the_other(start_pool: StartPool) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    first, second = worker.devices.started
    assert states(order(worker, model="new")) == {"cpu:0": "loading", "cpu:1": "waiting"}
    assert [each.settings and each.settings.model for each in reloads(first)] == ["new"]
    assert reloads(second) == []
    first.say(Reloaded(EMBED, "v2", 1.5))
    worker.loop.settle()
    assert states(order(worker)) == {"cpu:0": "reloaded", "cpu:1": "loading"}
    second.say(Reloaded(EMBED, "v2", 1.5))
    worker.loop.settle()
    report = order(worker)
    assert report["is_over"]
    assert report["devices"]["cpu:0"] == {
        "state": "reloaded",
        "version": "v2",
        "before": "",
        "load_s": 1.5,
        "error": "",
    }
    # Asked again, it begins nothing again.
    assert len(reloads(first)) == 1
    # What starts anew loads what was reloaded.
    assert kill(worker, first).setups[0].versions[EMBED].model == "new"


def test_a_version_that_does_not_load_is_not_tried_elsewhere(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    first, second = worker.devices.started
    order(worker, model="broken")
    first.say(Reloaded(EMBED, "v1", 0.0, "there is no such folder"))
    worker.loop.settle()
    report = order(worker)
    assert report["is_over"]
    errors = [each["error"] for each in report["devices"].values()]
    assert errors == ["there is no such folder", "not tried, as another device failed"]
    assert "goes on as before: there is no such folder" in caplog.text
    # The settings may have changed: a fresh process has the version that serves.
    assert kill(worker, first).setups[0].versions[EMBED].model == "old"
    assert reloads(second) == []


def test_a_device_that_dies_meanwhile_has_the_old_version_again(start_pool: StartPool) -> None:
    worker = start(start_pool)
    order(worker, model="new")
    (job,) = worker.receive_each("a")
    worker.loop.settle()
    fresh = kill(worker, worker.device)
    report = order(worker)
    assert (states(report), report["is_over"]) == ({"cpu": "failed"}, True)
    assert fresh.setups[0].versions[EMBED].model == "old"
    worker.work_off()
    assert worker.result(job.id) == "a"


def test_a_device_that_was_recycled_meanwhile_is_told_again(start_pool: StartPool) -> None:
    worker = start(start_pool)
    order(worker, model="new")
    worker.pool.restart()
    worker.loop.sleep(1)
    worker.work_off()
    assert len(worker.devices.started) == 2
    assert len(reloads(worker.device)) == 1
    worker.device.say(Reloaded(EMBED, "v2", 1.0))
    worker.loop.settle()
    assert order(worker)["is_over"]


def test_orders_wait_for_each_other(start_pool: StartPool) -> None:
    worker = start(start_pool)
    order(worker, "1", model="second")
    assert states(order(worker, "2", model="third")) == {"cpu": "waiting"}
    worker.device.say(Reloaded(EMBED, "v2", 1.0))
    worker.loop.settle()
    assert states(order(worker, "2")) == {"cpu": "loading"}
    assert [each.settings and each.settings.model for each in reloads(worker.device)] == [
        *("second", "third")
    ]


def test_what_must_not_change_in_a_running_worker_is_refused(start_pool: StartPool) -> None:
    worker = start(start_pool)
    assert order(worker, "1", "unknown") == {"devices": {}, "is_over": True, "error": ""}
    assert "the app's own class says" in order(worker, "2", OWN, model="new")["error"]
    install(app, models={EMBED: ModelSettings(kind="rerank", model="x", queue="celery")})
    cast(ModelTask, app.tasks[EMBED]).model_options = {"settings": OLD}
    error = order(worker, "3")["error"]
    assert error == (
        "model 'embed': kind was embedding when this worker started, and is rerank now; restart"
        " the worker"
    )
    assert reloads(worker.device) == []


def test_a_model_of_the_app_s_own_is_loaded_anew(start_pool: StartPool) -> None:
    worker = start(start_pool)
    order(worker, task=OWN)
    assert reloads(worker.device) == [Reload(OWN, None)]
    worker.device.say(Reloaded(OWN, "", 1.0))
    worker.loop.settle()
    assert order(worker)["is_over"]
    assert kill(worker, worker.device).setups[0].versions == {}


def start_slots(start_pool: StartPool) -> tuple[FakeWorker, FakeDevice]:
    options = {"settings": ModelSettings(kind="generation", model="old")}
    register(app, SLOTS, StepModel, slots=4, options=options)
    install(app, models={SLOTS: ModelSettings(kind="generation", model="old")})
    app.tasks.pop(SLOTS)
    register(app, SLOTS, StepModel, slots=4, options=options)
    worker = start_pool()
    worker.loop.settle()
    for each in worker.devices.started:
        each.hear()
    (slotted,) = (each for each in worker.devices.started if each.setups[0].task == SLOTS)
    return worker, slotted


def test_a_model_with_slots_gets_a_fresh_process_after_its_jobs(start_pool: StartPool) -> None:
    worker, old = start_slots(start_pool)
    (running,) = worker.receive_each("a", task=SLOTS)
    worker.loop.settle()
    order(worker, task=SLOTS, model="new")
    (waiting,) = worker.receive_each("b", task=SLOTS)
    assert worker.works(old) == [["a"]]
    worker.work_off()
    fresh = worker.device
    assert (old.code, fresh.setups[0].versions[SLOTS].model) == (0, "new")
    assert states(order(worker)) == {f"cpu/{SLOTS}": "reloaded"}
    assert worker.results([running, waiting]) == ["a", "b"]


def test_a_model_with_slots_that_does_not_load_has_its_old_version_again(
    start_pool: StartPool,
) -> None:
    worker, _ = start_slots(start_pool)
    worker.devices.get_ready = False
    order(worker, task=SLOTS, model="broken")
    worker.work_off()
    assert worker.device.setups[0].versions[SLOTS].model == "broken"
    worker.devices.get_ready = True
    worker.device.say(NotReady("ModelLoadError", "there is no such folder"))
    worker.device.die(1)
    worker.loop.sleep(5)
    report = order(worker)
    assert report["devices"][f"cpu/{SLOTS}"]["error"] == "there is no such folder"
    worker.device.hear()
    assert worker.device.setups[0].versions[SLOTS].model == "old"
    (job,) = worker.receive_each("b", task=SLOTS)
    worker.work_off()
    assert worker.result(job.id) == "b"


def test_different_versions_are_reported_once(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    caplog.set_level(logging.WARNING)
    first, second = worker.devices.started
    worker.devices.get_ready = False

    def get_ready(device: FakeDevice, version: str) -> None:
        figures = {"models": {EMBED: {"version": version}}, "memory": {}}
        device.say(Ready(device.pid, 0.5, figures))
        worker.loop.settle()

    fresh = kill(worker, first)
    get_ready(fresh, "v1")
    fresh = kill(worker, second)
    get_ready(fresh, "v2")
    get_ready(fresh, "v2")
    assert caplog.text.count("device cpu:0 serves version v1, and device cpu:1 version v2") == 1
    assert "run `batchery reload embed`" in caplog.text


# Drain


def drain(worker: FakeWorker, device: str, *, undo: bool, number: str = "1") -> dict[str, str]:
    """Orders that a device leaves, or returns; says how all devices are."""
    answer = worker.pool.drain(number, device, undo=undo)
    assert answer is not None
    return cast(dict[str, str], answer["devices"])


def test_a_device_that_is_drained_finishes_and_leaves(start_pool: StartPool) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    first, second = worker.devices.started
    jobs = worker.receive_each("a")
    worker.loop.settle()
    busy, idle = (first, second) if first.hear() else (second, first)
    name = "cpu:0" if busy is first else "cpu:1"
    drain(worker, name, undo=False)
    assert drain(worker, name, undo=False)[name] == "draining"
    jobs += worker.receive_each(*"bcdef")
    worker.work_off()
    assert worker.results(jobs) == list("abcdef")
    assert (worker.works(busy), busy.code, idle.code) == ([["a"]], 0, None)
    figures = worker.info()["devices"][name]
    assert (figures["state"], figures["pid"]) == ("drained", 0)
    # It stays so, whatever the other one does.
    worker.pool.restart()
    worker.work_off()
    drain(worker, name, undo=True)
    worker.work_off()
    assert {each["state"] for each in worker.info()["devices"].values()} == {"ready"}
    assert worker.info()["batches"]["device_restarts"] == 0


def test_nothing_is_wanted_while_all_devices_are_drained(start_pool: StartPool) -> None:
    worker = start(start_pool)
    demand: Any = worker.pool.find_demand()
    assert demand.free() == 64
    drain(worker, "cpu", undo=False)
    assert (demand.free(), demand.limit({FOUR: 4}, 0)) == (0, 0)
    (job,) = worker.receive_each("a")
    worker.loop.sleep(60)
    worker.reconnect()
    assert len(worker.devices.started) == 1
    # The message comes again, as the connection broke.
    (job,) = worker.receive_each("a")
    assert demand.offer_stranded(lambda _: ()) == 0
    drain(worker, "cpu", undo=True)
    worker.work_off()
    assert worker.result(job.id) == "a"


def test_a_drained_device_loads_the_new_version_when_it_starts(start_pool: StartPool) -> None:
    worker = start(start_pool)
    drain(worker, "cpu", undo=False)
    worker.work_off()
    report = order(worker, model="new")
    assert (states(report), report["is_over"]) == ({"cpu": "reloaded"}, True)
    drain(worker, "cpu", undo=True)
    worker.loop.settle()
    worker.device.hear()
    assert worker.device.setups[0].versions[EMBED].model == "new"


def test_a_card_stands_for_all_of_its_processes(start_pool: StartPool) -> None:
    worker, slotted = start_slots(start_pool)
    drain(worker, f"cpu/{SLOTS}", undo=False)
    worker.work_off()
    assert drain(worker, "other", undo=False)["cpu"] == "ready"
    drain(worker, "cpu", undo=False)
    worker.work_off()
    assert set(drain(worker, "cpu", undo=False).values()) == {"drained"}
    assert slotted.code == 0


# Devices that were given up


def give_up(worker: FakeWorker, device: FakeDevice) -> None:
    """Has a device die, and all starts after that fail."""
    worker.devices.get_ready = False
    device.die()
    for _ in range(5):
        worker.loop.sleep(5)
        worker.device.refuse("ModelLoadError", "the driver is too old")
    worker.loop.settle()
    worker.devices.get_ready = True


def test_a_device_that_was_given_up_is_started_again(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    first, second = worker.devices.started
    give_up(worker, second)
    text = "device cpu:1 is given up after 5 starts: the driver is too old; `batchery drain cpu:1"
    assert text in caplog.text
    figures = worker.info()["devices"]["cpu:1"]
    assert (figures["state"], figures["error"]) == ("given up", "the driver is too old")
    # A new version waits for it, and nothing else does.
    order(worker, model="new")
    first.say(Reloaded(EMBED, "v2", 1.5))
    worker.loop.settle()
    assert order(worker)["is_over"]
    started = len(worker.devices.started)
    assert drain(worker, "cpu:1", undo=False)["cpu:1"] == "given up"
    worker.reconnect()
    worker.pool.restart()
    worker.work_off()
    assert len(worker.devices.started) == started + 1
    assert drain(worker, "cpu:1", undo=True)["cpu:1"] == "starting"
    worker.work_off()
    assert drain(worker, "cpu:1", undo=True)["cpu:1"] == "ready"
    assert worker.info()["devices"]["cpu:1"]["error"] == ""
    assert worker.device.setups[0].versions[EMBED].model == "new"


def test_a_start_that_fails_again_is_the_only_one_of_its_order(start_pool: StartPool) -> None:
    worker = start(start_pool, "cpu:0", "cpu:1")
    give_up(worker, worker.devices.started[1])
    started = len(worker.devices.started)
    worker.devices.get_ready = False
    for number in "12":
        drain(worker, "cpu:1", undo=True, number=number)
        worker.device.die(1)
        worker.loop.sleep(60)
        assert drain(worker, "cpu:1", undo=True, number=number)["cpu:1"] == "given up"
    assert len(worker.devices.started) == started + 2
    answer = worker.pool.drain("2", "cpu:1", undo=True) or {}
    assert answer["errors"] == {"cpu:1": "device process for cpu:1 died: exit code 1"}


def test_a_start_that_hangs_is_a_failed_one(
    start_pool: StartPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start_pool("cpu:0", "cpu:1", device_start_timeout_s=50)
    worker.devices.get_ready = False
    worker.devices.started[1].die()
    worker.loop.sleep(1)
    worker.reconnect()
    for _ in range(4):
        held = worker.device
        worker.loop.sleep(40)
        assert held.code is None
        worker.loop.sleep(11)
        assert held.code == -9
    worker.loop.sleep(60)
    assert "cpu:1 is not ready after device_start_timeout_s = 50 s: it is killed" in caplog.text
    assert worker.info()["devices"]["cpu:1"]["state"] == "given up"
