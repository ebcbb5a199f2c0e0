"""Which jobs only Celery's tracer can complete: a test for each clause."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, signals
from celery.backends.redis import RedisBackend
from celery.fixups import django

from batchery import BatchTask, install
from batchery_worker.commit.eligibility import (
    HOOKS,
    SIGNALS,
    TracerReasons,
    receivers_need_tracer,
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


@pytest.mark.parametrize("hook", HOOKS)
def test_task_with_a_hook_needs_the_tracer(hook: str) -> None:
    def called(*_: Any) -> None:
        """Whatever it does."""

    base = type("Hooked", (BatchTask,), {"abstract": True, hook: called})
    assert of_task(make_app(), base) == f"an overridden {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_set_on_the_task_object_needs_the_tracer(hook: str) -> None:
    app = make_app()
    task = make_task(app)
    setattr(task, hook, print)
    assert task_needs_tracer(app, task) == f"an overridden {hook}"


def test_every_hook_of_celerys_tasks_is_known() -> None:
    own = {
        name for name in vars(BatchTask.__mro__[1]) if name.startswith(("on_", "before", "after"))
    }
    # Called when a task is made, and by `Task.replace`.
    assert own - {"on_bound", "on_replace"} == set(HOOKS)


def test_task_that_tracks_started_needs_the_tracer() -> None:
    assert of_task(make_app(), track_started=True) == "task_track_started"
    assert of_task(make_app(task_track_started=True)) == "task_track_started"


def test_task_with_autoretry_needs_the_tracer() -> None:
    assert of_task(make_app(), autoretry_for=(OSError,)) == "autoretry_for"


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


# Of the signals


@contextlib.contextmanager
def connected(signal: Any, receiver: Any, sender: Any = None) -> Iterator[None]:
    signal.connect(receiver, sender=sender)
    try:
        yield
    finally:
        signal.disconnect(receiver, sender=sender)


def listen(**_: Any) -> None:
    """A receiver."""


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_with_a_receiver_needs_the_tracer(name: str) -> None:
    task = make_task(make_app())
    assert receivers_need_tracer(task) is None
    with connected(SIGNALS[name], listen):
        assert receivers_need_tracer(task) == f"a receiver of {name}"
    assert receivers_need_tracer(task) is None


def test_receiver_of_another_task_does_not_need_the_tracer() -> None:
    task, other = make_task(make_app()), make_task(make_app())
    with connected(signals.task_success, listen, sender=other):
        assert receivers_need_tracer(task) is None
        assert receivers_need_tracer(other) == "a receiver of task_success"


def test_celery_s_receivers_for_django_do_not_need_the_tracer() -> None:
    # Its constructor imports Django, which need not be here.
    made: Any = django
    fixup = made.DjangoWorkerFixup.__new__(made.DjangoWorkerFixup)
    task = make_task(make_app())
    with (
        connected(signals.task_prerun, fixup.on_task_prerun),
        connected(signals.task_postrun, fixup.on_task_postrun),
    ):
        assert receivers_need_tracer(task) is None
        with connected(signals.task_postrun, listen):
            assert receivers_need_tracer(task) == "a receiver of task_postrun"


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


# All together


def test_constant_reasons_are_cached_and_changing_ones_are_not() -> None:
    app = make_app()
    task = make_task(app)
    needs = TracerReasons(app)
    assert needs.of_task(task) is None
    with connected(signals.task_success, listen):
        assert needs.of_task(task) == "a receiver of task_success"
    assert needs.of_task(task) is None
