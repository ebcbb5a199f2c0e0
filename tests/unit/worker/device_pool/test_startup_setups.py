"""What device processes are told when they start."""

import logging
import os
import sys
from types import ModuleType

import pytest
from celery import Celery

from batchery import AppNotImportable, BatchTask, Model, Settings, install, register
from batchery.task import ModelTask
from batchery_worker.device_pool.startup import choose_devices, device_setups


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    app = install(Celery("set_up", broker="memory://", set_as_current=False))
    module = ModuleType("set_up_shop")
    vars(module)["app"] = app
    monkeypatch.setitem(sys.modules, "set_up_shop", module)
    return app


def model(app: Celery, name: str) -> ModelTask:
    return register(app, name, type("Some", (Model,), {"__module__": "set_up_shop.models"}))


def test_the_module_that_registers_a_model_is_imported(app: Celery) -> None:
    (setup,) = device_setups(app, [model(app, "embed")], Settings(), ["cpu"])
    assert setup.modules == [__name__]


def test_every_device_has_a_setup_of_its_own(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed")]
    setups = device_setups(app, tasks, Settings(), ["cuda:0", "cuda:1"])
    assert [setup.device for setup in setups] == ["cuda:0", "cuda:1"]
    for setup in setups:
        assert setup.app == "set_up_shop:app"
        assert list(setup.sys_path) == [os.getcwd(), *sys.path]
        assert setup.log_levels[""] == logging.getLogger().getEffectiveLevel()


def test_only_models_whose_queue_is_consumed_are_loaded_at_the_start(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed"), model(app, "classify")]
    app.amqp.queues.select(["classify"])
    (setup,) = device_setups(app, tasks, Settings(), ["cpu"])
    assert setup.load == ["classify"]


def test_an_app_nobody_can_import_is_refused() -> None:
    app = install(Celery("nowhere", broker="memory://", set_as_current=False))
    with pytest.raises(AppNotImportable):
        device_setups(app, [], Settings(), ["cpu"])


def test_devices_of_the_setting_are_used() -> None:
    assert choose_devices(["cuda", "mps", "cpu"]) == ["cuda:0", "mps", "cpu"]
    assert choose_devices("auto")


def test_a_device_is_told_how_much_memory_it_may_use(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed")]
    (setup,) = device_setups(app, tasks, Settings(memory_fraction=0.5), ["cuda:0"])
    assert setup.memory_fraction == 0.5
