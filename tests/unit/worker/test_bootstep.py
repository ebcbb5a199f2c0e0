"""How much a worker prefetches, which queues it consumes, and when it refuses to start."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.concurrency.thread import TaskPool

from batchery import BatchTask, Model, SettingsError, install, register
from batchery_worker.bootstep import (
    BatchStep,
    check_is_accepted,
    is_served,
    warn_of_unused_queues,
)

#: For tests of tasks that have a queue of their own.
OWN_QUEUES = pytest.mark.filterwarnings("ignore:[^']*'queue' task attribute is deprecated")


class Worker:
    """As much of Celery's `WorkController` as the step reads."""

    hostname = "worker@test"
    task_events = False
    soft_time_limit = time_limit = max_concurrency = None
    blueprint = SimpleNamespace(order=())

    def __init__(
        self,
        app: Celery,
        *,
        pool: type = TaskPool,
        concurrency: int = 2,
        multiplier: int = 4,
    ) -> None:
        self.app = app
        self.pool: Any = pool(concurrency, app=app)
        self.concurrency = self.min_concurrency = concurrency
        self.prefetch_multiplier = multiplier


def make_app(**settings: Any) -> Celery:
    app = Celery("stepped", broker="memory://", set_as_current=False)
    return install(app, **settings)


def add_task(app: Celery, name: str = "work", **options: Any) -> BatchTask:
    task: BatchTask = app.register_task(
        type("Work", (BatchTask,), {"name": name, "run": lambda _, items: items, **options})()
    )
    return task


def prepare(worker: Worker) -> None:
    BatchStep(worker).create(worker)


@OWN_QUEUES
@pytest.mark.parametrize(
    ("consumed", "served"),
    [
        (None, {"free", "routed", "own", "embed"}),
        (["celery"], {"free"}),
        (["theirs", "embed"], {"routed", "own", "embed"}),
        (["theirs", "named"], {"free", "routed", "own"}),
    ],
)
def test_task_routed_to_another_worker_s_queue_is_not_served(
    consumed: list[str] | None, served: set[str]
) -> None:
    app = make_app()
    app.conf.task_routes = {"routed": {"queue": "theirs"}}
    tasks = [add_task(app, "free"), add_task(app, "routed"), add_task(app, "own", queue="theirs")]
    tasks.append(register(app, "embed", Model))
    queues: Any = app.amqp.queues
    queues.select_add("embed")
    if consumed is None:
        queues.select_add("theirs")
    else:
        queues.select(consumed)
    assert {task.name for task in tasks if is_served(task)} == served


def test_model_whose_queue_the_app_does_not_create_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    app.conf.task_create_missing_queues = False
    register(app, "embed", Model)
    assert "task 'embed': its queue 'embed' is not among task_queues" in refused(
        Worker(app), caplog
    )


def refused(worker: Worker, caplog: pytest.LogCaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        prepare(worker)
    assert ended.value.code == 2
    (record,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size = 0"),
        ({"models": {"embed": {"kind": "poetry", "model": "x"}}}, "models.embed.kind"),
    ],
)
def test_a_wrong_setting_ends_the_worker_with_one_line(
    settings: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(**settings)
    add_task(app)
    app.finalize()
    assert text in refused(Worker(app), caplog)


@pytest.mark.parametrize(
    "option",
    [
        {"max_batch_size": 0},
        {"max_batch_size": -1},
        {"max_batch_size": "64"},
        {"max_batch_size": 2.5},
        {"max_batch_size": True},
        {"max_batch_tokens": 0},
        {"max_wait_ms": -1},
        {"max_wait_ms": "soon"},
        {"max_wait_ms": float("nan")},
        {"cache": True},
        {"cache": ""},
        {"cache": 1},
        {"cache_ttl_s": 0},
    ],
)
def test_an_impossible_task_option_ends_the_worker(
    option: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    add_task(app, "odd", **option)
    (name,) = option
    assert f"task 'odd': {name} = {option[name]!r}" in refused(Worker(app), caplog)


def add_function(app: Celery, function: Callable[..., Any], **options: Any) -> None:
    app.finalize()
    decorate: Any = app.task(base=BatchTask, shared=False, name="odd", **options)
    decorate(function)


def same(items: list[Any]) -> list[Any]:
    return items


def seeing(task: BatchTask, items: list[Any]) -> list[Any]:
    return [task.name, *items]


def test_a_cache_for_a_function_that_sees_its_requests_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    add_function(app, seeing, bind=True, cache="1")
    assert "task 'odd': its function sees the requests" in refused(Worker(app), caplog)


@pytest.mark.parametrize("backend", ["cache+memory://", None, "redis://localhost:1/0"], ids=str)
def test_a_cache_without_redis_ends_the_worker(
    backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    app.conf.update(result_backend=backend)
    add_function(app, same, cache="1", cache_ttl_s=60)
    if backend and backend.startswith("redis:"):
        prepare(Worker(app))
    else:
        text = "task 'odd': cache needs Celery's result backend for Redis"
        assert text in refused(Worker(app), caplog)


def test_worker_that_does_not_accept_the_jobs_of_a_task_is_refused() -> None:
    app = Celery("pickles", set_as_current=False)

    @app.task(base=BatchTask, shared=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    task: Any = shout
    for accepted in (["json"], ["application/json", "pickle"], {"json", "yaml"}):
        app.conf.accept_content = accepted
        check_is_accepted(app, task)
    app.conf.accept_content = ["pickle"]
    with pytest.raises(SettingsError, match="add 'json' to accept_content"):
        check_is_accepted(app, task)
    task.serializer = "auth"
    with pytest.raises(SettingsError, match=r"call app.setup_security\(\) if messages are signed"):
        check_is_accepted(app, task)


def test_worker_whose_task_was_made_before_its_messages_were_to_be_signed_is_refused() -> None:
    app = Celery("late", set_as_current=False)

    @app.task(base=BatchTask, shared=False, lazy=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    task: Any = shout
    app.conf.update(task_serializer="auth", accept_content=["application/data"])
    with pytest.raises(SettingsError, match="jobs are not signed"):
        check_is_accepted(app, task)


def pay() -> None:
    """Any task."""


@OWN_QUEUES
@pytest.mark.parametrize(
    ("queue", "is_warned_of"), [("embde", True), ("reports", False), ("embed2", False)]
)
def test_a_misspelt_queue_is_warned_of_where_other_tasks_have_no_route(
    queue: str, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs of a task without a route may come by any queue."""
    with Celery("shop", set_as_current=False) as app:
        app.conf.task_routes = {"embed": {"queue": "embed"}}
        for name in ("embed", "pay"):
            app.task(name=name, shared=False, lazy=False)(pay)
        app.task(name="own", shared=False, lazy=False, queue="embed2")(pay)
        app.amqp.queues.select([queue])
        warn_of_unused_queues(app)
    assert ("the nearest is embed" in caplog.text) is is_warned_of
