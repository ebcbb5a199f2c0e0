"""What `install` does to an app, and what it leaves alone."""

import logging
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task

from batchery import BatchTask, Failed, ItemFailed, Model, SettingsError, install, register
from batchery.installation import get_installation
from batchery.model_task import ModelTask

MODELS: dict[str, dict[str, Any]] = {
    "embed": {"kind": "embedding", "model": "x", "max_batch_size": 5, "max_wait_ms": 1.5},
    "moods": {"kind": "classification", "model": "y", "queue": "gpu", "max_batch_tokens": 99},
}


@pytest.fixture(autouse=True)
def clean(no_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def make_app(**options: Any) -> Celery:
    return Celery("installed", broker="memory://", set_as_current=False, **options)


def ordinary(number: int) -> int:
    return number + 1


def test_ordinary_tasks_are_not_changed_by_install() -> None:
    plain, app = make_app(), make_app()
    plain_task, task = plain.task(shared=False)(ordinary), app.task(shared=False)(ordinary)
    assert install(app) is app
    plain.finalize()
    app.finalize()
    before, after = dict(plain.conf), dict(app.conf)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"worker_consumer", "worker_autoscaler"}
    assert set(plain.tasks) == set(app.tasks)
    assert type(task).__mro__[2:] == type(plain_task).__mro__[2:]
    assert isinstance(task, Task)
    assert not isinstance(task, BatchTask)
    for option in ("acks_late", "serializer", "Request", "Strategy", "ignore_result"):
        assert getattr(task, option, None) == getattr(plain_task, option, None)
    assert dict(app.amqp.queues) == dict(plain.amqp.queues)
    assert task.apply((1,)).get() == 2


def test_second_install_changes_nothing() -> None:
    app = install(install(make_app(), models=MODELS), models=MODELS)
    app.finalize()
    assert install(app, models=MODELS) is app
    assert {name for name in app.tasks if not name.startswith("celery.")} == {"embed", "moods"}


def test_the_app_s_own_consumer_stays() -> None:
    own = make_app()
    own.conf.worker_consumer = "my.own:Consumer"
    assert install(own).conf.worker_consumer == "my.own:Consumer"
    # Though the configuration is read once more.
    app = install(make_app())
    assert app.conf.worker_consumer != "my.own:Consumer"
    app.config_from_object({"worker_consumer": "my.own:Consumer"})
    assert app.conf.worker_consumer == "my.own:Consumer"


def test_models_of_the_settings_become_tasks_with_queues_of_their_own() -> None:
    embed = {**MODELS["embed"], "aliases": ["ada", "text-embedding-3-small"]}
    app = install(make_app(), models={**MODELS, "embed": embed})
    app.finalize()
    embedding, moods = app.tasks["embed"], app.tasks["moods"]
    assert isinstance(embedding, ModelTask)
    assert isinstance(moods, ModelTask)
    limits = (embedding.model_queue, embedding.max_batch_size, embedding.max_wait_ms)
    assert limits == ("embed", 5, 1.5)
    assert (moods.model_queue, moods.max_batch_size, moods.max_batch_tokens) == ("gpu", None, 99)
    assert moods.is_installed
    assert "torch" not in embedding.__module__


def test_an_app_that_is_finalized_already_gets_its_models_at_once() -> None:
    app = make_app()
    app.finalize()
    install(app, models=MODELS)
    assert "embed" in app.tasks


def test_wrong_settings_are_kept_for_the_worker_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = install(make_app(), models={"embed": {"kind": "poetry", "model": "x"}})
    task = app.task(shared=False)(ordinary)
    with caplog.at_level(logging.ERROR):
        app.finalize()
    error = get_installation(app).error
    assert isinstance(error, SettingsError)
    assert "models.embed.kind" in str(error)
    assert str(error) in caplog.text
    assert task.apply((1,)).get() == 2


def test_settings_are_not_read_before_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHERY_TYPO", "1")
    app = install(make_app())
    assert get_installation(app).error is None
    app.finalize()
    assert "BATCHERY_TYPO" in str(get_installation(app).error)


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = install(make_app(), max_batch_size=3)
    first = get_installation(app).settings
    monkeypatch.setenv("BATCHERY_MAX_WAIT_MS", "7")
    assert get_installation(app).settings is first
    assert (first.max_batch_size, first.max_wait_ms) == (3, 0)


def test_app_without_install_raises_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"'installed': call batchery.install\(app\) first"):
        get_installation(make_app())


class Doubling(Model):
    """Doubles."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def forward(self, batch: Any, *_: Any, **keywords: Any) -> Any:
        return [self.factor * each for each in batch]


def test_a_registered_model_is_a_task_with_a_queue() -> None:
    app = install(make_app())
    task = register(app, "double", Doubling, max_batch_size=3, rate_limit="5/s")
    assert app.tasks["double"] is task
    assert (task.name, task.model_queue, task.max_batch_size) == ("double", "double", 3)
    assert task.rate_limit == "5/s"
    assert task.__doc__ == "Doubles."
    assert task.__module__ == __name__
    assert task("ab") == "abab"


def test_a_registered_model_may_have_options_and_another_queue() -> None:
    task = register(install(make_app()), "triple", Doubling, options={"factor": 3}, queue="gpu")
    assert task.model_queue == "gpu"
    assert task.apply((2,)).get() == 6


class Refusing(Doubling):
    """Takes no item."""

    def preprocess(self, items: Any, *_: Any, **keywords: Any) -> Any:
        return [Failed(f"not {each}") for each in items]


@pytest.mark.parametrize("pads", [True, False])
def test_an_item_that_preprocess_refuses_is_its_own_error_without_a_worker(
    pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "pads", pads)
    app = install(make_app())
    task = register(app, f"refuse-{pads}", Refusing)
    with pytest.raises(ItemFailed, match="not 5"):
        task(5)
    app.conf.task_always_eager = True
    for result in (task.apply((5,)), task.delay(5)):
        assert isinstance(result.result, ItemFailed)


def test_a_model_may_be_named_by_its_path_which_is_imported_when_it_runs() -> None:
    app = install(make_app())
    task = register(app, "lazy", "no.such.module:Model")
    assert task.__doc__ is None
    with pytest.raises(ModuleNotFoundError):
        task.make_model()


def test_jobs_of_a_model_go_to_its_queue() -> None:
    app = install(make_app())
    task = register(app, "double-sent", Doubling)
    task.delay(1)
    app.send_task("double-sent", [2])
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        for _ in range(2):
            message = channel.basic_get("double-sent", no_ack=True)
            assert message.headers["task"] == "double-sent"
