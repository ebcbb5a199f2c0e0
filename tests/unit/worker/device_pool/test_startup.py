"""Import paths of apps and tasks, from real modules."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from batchery import AppNotImportable, BatchTask
from batchery_worker.device_pool.startup import app_path, task_modules
from batchery_worker.devstack.guarded_process import python_command


@pytest.fixture
def app() -> Celery:
    return Celery("located", broker="memory://", set_as_current=False)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


def test_an_app_is_found_where_it_is_an_attribute(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(monkeypatch, "shop_somewhere.celery", queue=app)
    assert app_path(app) == "shop_somewhere.celery:queue"


def test_a_module_wins_over_main(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "app", app, raising=False)
    with pytest.raises(AppNotImportable, match="is defined in __main__"):
        app_path(app)
    # As multiprocessing does when it is imported.
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    with pytest.raises(AppNotImportable, match="is defined in __main__"):
        app_path(app)
    module(monkeypatch, "shop_elsewhere", app=app)
    assert app_path(app) == "shop_elsewhere:app"


def test_an_app_that_no_module_has_is_refused(app: Celery) -> None:
    with pytest.raises(AppNotImportable, match="'located' is not an attribute of any module"):
        app_path(app)


def test_celery_s_own_reference_to_the_app_is_ignored(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(monkeypatch, "celery.something", default_app=app)
    with pytest.raises(AppNotImportable):
        app_path(app)


def test_entries_that_are_not_modules_are_ignored(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "odd_none", None)
    monkeypatch.setitem(sys.modules, "odd_object", object())
    monkeypatch.setitem(sys.modules, "odd_space", SimpleNamespace(app=1))
    module(monkeypatch, "plain_shop", app=app)
    assert app_path(app) == "plain_shop:app"


def test_the_modules_of_tasks_are_sorted_and_named_once(app: Celery) -> None:
    tasks = [
        type("T", (BatchTask,), {"name": f"t{at}", "__module__": name})()
        for at, name in enumerate(["b.tasks", "a.tasks", "b.tasks"])
    ]
    assert task_modules(tasks) == ["a.tasks", "b.tasks"]
    assert task_modules([]) == []


def test_a_task_of_main_is_refused_by_name() -> None:
    task = type("T", (BatchTask,), {"name": "lost", "__module__": "__main__"})()
    with pytest.raises(AppNotImportable, match="'lost' is defined in __main__"):
        task_modules([task])


def test_the_working_directory_is_on_the_path_of_others_only_if_it_is_on_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert python_command() == [sys.executable, "-P"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert python_command() == [sys.executable]
    monkeypatch.setattr(sys, "path", ["", *sys.path[:-1]])
    assert python_command() == [sys.executable]
    tmp_path.rmdir()
    assert python_command() == [sys.executable, "-P"]
