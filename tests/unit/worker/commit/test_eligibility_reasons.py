"""Which jobs only Celery's tracer can complete: a test for each clause."""

from typing import Any

import pytest
from celery import Celery
from celery.app import trace
from celery.backends.redis import RedisBackend

from batchery import BatchTask, install
from batchery_worker.commit.eligibility import (
    request_needs_tracer,
    task_needs_tracer,
)

#: What a body carries beside arguments where a job has none of it.
PLAIN = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def make_app(**conf: Any) -> Celery:
    url = "redis://127.0.0.1:1/0"  # nobody is asked anything
    app = install(Celery("needs", broker=url, backend=url, set_as_current=False))
    app.conf.update(conf)
    return app


def same(items: list[Any]) -> list[Any]:
    return items


def make_task(app: Celery, base: type = BatchTask, **options: Any) -> Any:
    decorate: Any = app.task(base=base, shared=False, name="same", **options)
    decorate(same)
    # Itself, as a worker has it, and not the promise that the decorator made.
    return app.tasks["same"]


def of_task(app: Celery, base: type = BatchTask, **options: Any) -> str | None:
    return task_needs_tracer(app, make_task(app, base, **options))


def test_plain_task_does_not_need_the_tracer() -> None:
    assert of_task(make_app()) is None


# Of the task


class Called(BatchTask):
    abstract = True

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return super().__call__(*args, **keywords)


def test_task_with_its_own_call_needs_the_tracer() -> None:
    assert of_task(make_app(), Called) == "an overridden __call__"


def test_task_that_sentry_has_wrapped_does_not_need_the_tracer() -> None:
    app = make_app()
    task = make_task(app)
    integration = pytest.importorskip("sentry_sdk.integrations.celery")
    type(task).__call__ = integration._wrap_task_call(task, type(task).__call__)
    assert task_needs_tracer(app, task) is None
    own = make_task(make_app(), Called)
    type(own).__call__ = integration._wrap_task_call(own, type(own).__call__)
    assert task_needs_tracer(own.app, own) == "an overridden __call__"


def test_tracer_that_somebody_else_has_wrapped_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    integration = pytest.importorskip("sentry_sdk.integrations.celery")
    stock = trace.build_tracer
    integration._patch_build_tracer()
    try:
        assert of_task(make_app()) is None
    finally:
        trace.build_tracer = stock
    monkeypatch.setattr(trace, "build_tracer", lambda *args, **options: stock(*args, **options))
    assert of_task(make_app()) == "a wrapper of build_tracer"


@pytest.mark.parametrize("options", [{"autoretry_for": (OSError,)}, {"on_success": print}])
def test_task_whose_failures_alone_need_the_tracer_does_not(options: dict[str, Any]) -> None:
    assert of_task(make_app(), **options) is None


def test_task_that_tracks_started_does_not_need_the_tracer() -> None:
    assert of_task(make_app(), track_started=True) is None
    assert of_task(make_app(task_track_started=True)) is None


def test_task_with_its_own_backend_needs_the_tracer() -> None:
    app = make_app()
    other = RedisBackend(app=app, url="redis://127.0.0.1:2/0")
    assert of_task(app, backend=other) == "a result backend of its own"


@pytest.mark.parametrize("backend", ["cache+memory://", "disabled://"])
def test_backend_other_than_redis_needs_the_tracer(backend: str) -> None:
    app = install(Celery("needs", broker="memory://", backend=backend, set_as_current=False))
    assert of_task(app) == "a result backend other than Celery's for Redis"


class OwnBackend(RedisBackend):
    """It may store what it likes."""


def test_subclass_of_the_redis_backend_needs_the_tracer() -> None:
    app = make_app()
    own: Any = OwnBackend(app=app, url="redis://127.0.0.1:1/0")
    setattr(app, "_backend", own)  # noqa: B010 - what the public property reads
    assert of_task(app) == "a result backend other than Celery's for Redis"


def test_results_in_another_serializer_need_the_tracer() -> None:
    app = make_app(result_serializer="yaml", result_accept_content=["yaml"])
    assert of_task(app) == "a result serializer other than JSON"


def test_compressed_results_need_the_tracer() -> None:
    assert of_task(make_app(result_compression="gzip")) == "compressed results"


@pytest.mark.parametrize(
    "conf",
    [
        {"result_extended": True},
        {"result_backend_transport_options": {"global_keyprefix": "shop-"}},
        {"task_ignore_result": True},
        {"task_store_errors_even_if_ignored": True},
        {"result_expires": 60},
    ],
)
def test_options_that_a_device_supports_do_not_need_the_tracer(conf: dict[str, Any]) -> None:
    assert of_task(make_app(**conf)) is None


# Of the message


def test_plain_message_does_not_need_the_tracer() -> None:
    headers = {"id": "a", "group": "g", "ignore_result": True, "replaced_task_nesting": 0}
    assert request_needs_tracer(headers, PLAIN) is None
    assert request_needs_tracer({"id": "a"}, None) is None


@pytest.mark.parametrize("name", list(PLAIN))
def test_message_with_callbacks_chain_or_chord_needs_the_tracer(name: str) -> None:
    assert request_needs_tracer({}, {**PLAIN, name: [{"task": "next"}]}) == name


def test_job_that_replaced_another_needs_the_tracer() -> None:
    assert (
        request_needs_tracer({"replaced_task_nesting": 1}, PLAIN) == "a job that replaced another"
    )


def test_fields_are_those_of_a_real_message() -> None:
    app = make_app()
    task = make_task(app)
    s = task.s("a")
    sent = {
        "callbacks": {"link": [s]},
        "errbacks": {"link_error": [s]},
        "chain": {"chain": [s]},
        "chord": {"chord": s},
    }
    for name, options in sent.items():
        message: Any = app.amqp.as_task_v2("id", task.name, ("a",), {}, **renamed(options))
        headers, _, (_, _, embed), _ = message
        assert request_needs_tracer(headers, embed) == name


def renamed(options: dict[str, Any]) -> dict[str, Any]:
    """As `apply_async` hands them on."""
    names = {"link": "callbacks", "link_error": "errbacks"}
    return {names.get(name, name): value for name, value in options.items()}
