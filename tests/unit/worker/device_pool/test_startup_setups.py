"""What device processes are told when they start."""

import logging
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery

from batchery import AppNotImportable, BatchTask, Model, ModelSettings, Settings, install, register
from batchery.model_task import ModelTask
from batchery_worker.device_pool.startup import choose_devices, device_setups, find_places
from batchery_worker.device_pool.weights import estimate_bytes
from batchery_worker.ipc.messages import JobsSetup, Setup
from support.tiny_models import save_model


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    app = install(Celery("set_up", broker="memory://", set_as_current=False))
    module = ModuleType("set_up_shop")
    vars(module)["app"] = app
    monkeypatch.setitem(sys.modules, "set_up_shop", module)
    return app


def set_up(
    app: Celery, tasks: list[BatchTask], settings: Settings, devices: list[str]
) -> list[Setup]:
    models = [task for task in tasks if isinstance(task, ModelTask)]
    return device_setups(app, tasks, settings, find_places(models, devices), jobs=JobsSetup())


def model(app: Celery, name: str) -> ModelTask:
    return register(app, name, type("Some", (Model,), {"__module__": "set_up_shop.models"}))


def test_the_module_that_registers_a_model_is_imported(app: Celery) -> None:
    (setup,) = set_up(app, [model(app, "embed")], Settings(), ["cpu"])
    assert setup.modules == [__name__]


def test_every_device_has_a_setup_of_its_own(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed")]
    setups = set_up(app, tasks, Settings(), ["cuda:0", "cuda:1"])
    assert [setup.device for setup in setups] == ["cuda:0", "cuda:1"]
    for setup in setups:
        assert setup.app == "set_up_shop:app"
        assert list(setup.sys_path) == [os.getcwd(), *sys.path]
        assert setup.log_levels[""] == logging.getLogger().getEffectiveLevel()


def test_only_models_whose_queue_is_consumed_are_loaded_at_the_start(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed"), model(app, "classify")]
    app.amqp.queues.select(["classify"])
    (setup,) = set_up(app, tasks, Settings(), ["cpu"])
    assert setup.load == ["classify"]


def test_an_app_nobody_can_import_is_refused() -> None:
    app = install(Celery("nowhere", broker="memory://", set_as_current=False))
    with pytest.raises(AppNotImportable):
        set_up(app, [], Settings(), ["cpu"])


def test_devices_of_the_setting_are_used() -> None:
    assert choose_devices(["cuda", "mps", "cpu"]) == ["cuda:0", "mps", "cpu"]
    assert choose_devices("auto")


def test_a_device_is_told_how_much_memory_it_may_use(app: Celery) -> None:
    tasks: list[BatchTask] = [model(app, "embed")]
    (setup,) = set_up(app, tasks, Settings(memory_fraction=0.5), ["cuda:0"])
    assert setup.memory_fraction == 0.5


def place(app: Celery, name: str, **options: Any) -> ModelTask:
    made = type("Some", (Model,), {"__module__": "set_up_shop.models"})
    return register(app, name, made, **options)


def test_models_are_only_on_their_devices_and_others_know_it(app: Celery) -> None:
    tasks: list[BatchTask] = [
        place(app, "embed", devices=["cuda:1"], pinned=True),
        place(app, "rank", devices=["cuda:0"]),
        place(app, "chat", slots=4, devices=["cuda"]),
    ]
    app.amqp.queues.select(["embed", "rank", "chat"])
    settings = Settings(model_memory_bytes=1000)
    setups = set_up(app, tasks, settings, ["cuda:0", "cuda:1"])
    assert [(setup.name, setup.load, setup.models) for setup in setups] == [
        ("cuda:0", ["rank"], {"rank": "devices"}),
        ("cuda:0/chat", ["chat"], {"chat": "devices"}),
        ("cuda:1", ["embed"], {"embed": "devices"}),
    ]
    served = [
        [name for name in ("embed", "rank", "chat") if setup.serves(name)] for setup in setups
    ]
    assert served == [["rank"], ["chat"], ["embed"]]
    assert {setup.pinned for setup in setups} == {frozenset({"embed"})}
    assert {setup.model_memory_bytes for setup in setups} == {1000}


def test_a_model_with_feeders_has_a_process_that_computes_and_those_that_feed_it(
    app: Celery,
) -> None:
    settings = ModelSettings(kind="embedding", model="some/model", feeders=2)
    options = {"settings": settings}
    tasks: list[BatchTask] = [
        place(app, "rank"),
        place(app, "embed", options=options, feeders=2, devices=["cuda:1"]),
    ]
    setups = set_up(app, tasks, Settings(), ["cuda:0", "cuda:1"])
    assert [setup.name for setup in setups] == [
        *("cuda:0", "cuda:1", "cuda:1/embed", "cuda:1/embed/1", "cuda:1/embed/2")
    ]
    # A feeder is told of no card, which it would look for.
    assert [setup.device for setup in setups[2:]] == ["cuda:1", "cpu", "cpu"]
    assert [setup.load for setup in setups[2:]] == [["embed"], [], []]
    assert [setup.computes for setup in setups] == [None, None, settings, None, None]
    assert [setup.serves("embed") for setup in setups] == [False, False, True, True, True]
    places = {"cpu": {"rank": "", "embed": ""}}
    handed = device_setups(app, tasks, Settings(), places, jobs=JobsSetup(is_handed=True))
    assert [setup.name for setup in handed] == ["cpu"]


def answer_all(items: list[Any]) -> list[Any]:
    return items


def test_functions_are_on_all_devices(app: Celery) -> None:
    tasks: list[BatchTask] = [place(app, "embed", devices=["cuda:1"])]
    app.amqp.queues.select(["embed"])
    decorate: Any = app.task(base=BatchTask, shared=False, name="shout", max_batch_size=4)
    decorate(answer_all)
    shout: Any = app.tasks["shout"]
    setups = set_up(app, [*tasks, shout], Settings(), ["cuda:0", "cuda:1"])
    assert [(setup.name, setup.load) for setup in setups] == [("cuda:0", []), ("cuda:1", ["embed"])]


def test_memory_is_estimated_by_the_table_of_contents_of_the_files(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "bert")
    written = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    settings = ModelSettings(kind="embedding", model=str(tmp_path / "model"))
    estimated = estimate_bytes(settings, "cpu") or 0
    assert 0.9 * written < estimated <= written
    assert estimate_bytes(settings, "cuda:0") == estimated / 2
    assert estimate_bytes(settings.model_copy(update={"dtype": "fp32"}), "cuda:0") == estimated
    # The same weights in another form, which nobody loads.
    whole = (tmp_path / "model" / "model.safetensors").rename(tmp_path / "whole")
    for name in ("consolidated", "model-00001-of-00002", "model-00002-of-00002"):
        shutil.copy(whole, tmp_path / "model" / f"{name}.safetensors")
    assert estimate_bytes(settings, "cpu") == 2 * estimated
    shutil.copy(whole, tmp_path / "model" / "model.safetensors")
    assert estimate_bytes(settings, "cpu") == estimated


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x01" * 20])
def test_memory_of_a_model_that_cannot_be_read_is_unknown(
    tmp_path: Path, content: bytes | None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    assert estimate_bytes(ModelSettings(kind="embedding", model=str(folder)), "cpu") is None
    hub = ModelSettings(kind="embedding", model="nobody/has-this")
    assert estimate_bytes(hub, "cpu") is None
    assert estimate_bytes(None, "cpu") is None
