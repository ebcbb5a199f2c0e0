"""How facts are gathered: what fails is unknown, and nobody is asked on and on."""

from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from batchery import BatchTask, install
from batchery.doctor import gather
from batchery.doctor.facts import Facts, FactUnknown, ask_each
from batchery.errors import AppNotImportable
from support.healthy_facts import WORKER, make_figures, make_survey


def fail(error: Exception) -> Any:
    raise error


def test_source_that_fails_is_a_fact_that_is_unknown() -> None:
    found = ask_each(
        {
            "first": lambda: 1,
            "refused": lambda: fail(redis.ResponseError("unknown command 'CONFIG'")),
            "unknown": lambda: fail(FactUnknown("there is none")),
            "odd": lambda: fail(KeyError("x")),
            "last": lambda: 2,
        }
    )
    assert (found["first"], found["last"]) == (1, 2)
    texts = [str(found[name]) for name in ("refused", "unknown", "odd")]
    assert texts == [
        "Redis refuses it: unknown command 'CONFIG'",
        "there is none",
        "KeyError: 'x'",
    ]


def test_nothing_more_is_asked_once_redis_does_not_answer() -> None:
    found = ask_each(
        {"first": lambda: fail(redis.TimeoutError("Timeout")), "second": lambda: fail(OSError())}
    )
    assert {name: str(why) for name, why in found.items()} == {"first": "Timeout"}
    with pytest.raises(FactUnknown, match="a Redis that answers"):
        _ = Facts(info=found["first"]).config


def test_clock_is_off_by_what_no_delay_explains() -> None:
    figures = make_figures()

    def ahead(time_s: float | None) -> dict[str, float]:
        figures.time_s = time_s
        return gather._compare_clocks(make_survey(figures), 1000.0, 1002.0)

    assert ahead(1001.5) == {WORKER: 0.0}
    assert ahead(1005.0) == {WORKER: 3.0}
    assert ahead(990.0) == {WORKER: -10.0}
    assert ahead(None) == {}


@pytest.mark.parametrize(
    ("broker", "backend", "expected"),
    [
        ("redis://localhost", "redis://127.0.0.1:6379/1", ("127.0.0.1:6379", "127.0.0.1:6379")),
        ("redis://:pw@a:1/0", "redis://b:2", ("a:1", "b:2")),
        ("redis://a:1;redis://b:2", "valkey://a:1", ("a:1", "a:1")),
        ("redis://[::1]:1/0", "redis://[::1]:1/1", ("::1:1", "::1:1")),
    ],
)
def test_servers_are_compared_by_host_and_port(
    broker: str, backend: str, expected: tuple[str, str]
) -> None:
    with install(Celery(broker=broker, backend=backend, set_as_current=False)) as app:
        assert gather._name_servers(app) == expected


def test_kind_of_the_backend_is_known_without_asking_it() -> None:
    def kind(backend: str | None) -> str:
        with Celery(broker="memory://", backend=backend, set_as_current=False) as app:
            return gather._name_backend(app)

    assert [kind(each) for each in (None, "redis://h", "rpc://")] == ["none", "redis", "other"]


def test_options_of_batch_tasks_are_read_with_their_queue() -> None:
    with install(Celery(broker="memory://", set_as_current=False)) as app:
        app.conf.task_routes = {"shout": {"queue": "loud"}}

        @app.task(base=BatchTask, name="shout", acks_late=False, time_limit=30)
        def shout(texts: list[str]) -> list[str]:
            return texts

        [task] = gather._list_app_sources(app)["tasks"]()
    assert (task.name, task.queue, task.serializer) == ("shout", "loud", "json")
    assert (task.acks_late, task.ignore_result, task.time_limit_s) == (False, False, 30)


def test_app_that_includes_what_cannot_be_imported_is_refused() -> None:
    with (
        Celery(broker="memory://", include=["no_such_module"], set_as_current=False) as app,
        pytest.raises(AppNotImportable, match="app 'shop': ModuleNotFoundError"),
    ):
        gather._gather_settings(app, "shop")


def test_app_without_install_has_no_settings() -> None:
    with Celery(broker="memory://", set_as_current=False) as app:
        found = gather._gather_settings(app, "shop")
    assert (found["is_installed"], found["settings_problem"]) == (False, "")
    assert "call batchery.install(app) first" in str(found["settings"])


def test_slow_command_is_named_without_its_arguments() -> None:
    entry = {"command": b"EVALSHA abc 1 secret", "duration": 150_000, "start_time": 0}
    slow = gather._read_slow(entry)
    assert (slow.name, slow.took_ms) == ("EVALSHA", 150.0)
    assert slow.age_s > 1e9


def test_job_is_weighed_in_the_longest_queue() -> None:
    jobs = {"p-long": 10, "p-urgent\x06\x163": 4}
    sizes = {"p-long": 5000, b"p-batchery:tenants:of:p-long\0acme": 7000, [*jobs][1]: 4800}
    client = SimpleNamespace(
        llen=lambda key: jobs.get(key, 0),
        memory_usage=lambda key, **_: sizes.get(key),
        zrange=lambda key, *_: [b"acme"] if key == "p-batchery:tenants:turns:p-long" else [],
    )
    channel = SimpleNamespace(
        global_keyprefix="p-",
        priority_steps=[0, 3],
        _q_for_pri=lambda name, step: f"{name}\x06\x16{step}" if step else name,
    )
    assert gather._weigh_job(client, channel, {"short": 1, "long": 10}) == 1200.0
    assert gather._weigh_job(client, channel, {"urgent": 4}) == 1200.0
    assert gather._weigh_job(client, channel, {}) == 0.0


def test_transport_options_of_a_worker_are_found_as_each_app_spells_them() -> None:
    read = gather._read_transport_options
    assert read({}) == {}
    assert read({"CELERY_BROKER_TRANSPORT_OPTIONS": {"a": 1}}) == {"a": 1}
    both = {"CELERY_BROKER_TRANSPORT_OPTIONS": {"a": 1}, "broker_transport_options": {"a": 2}}
    assert read(both) == {"a": 2}
