"""What each check of `batchery doctor` finds, by the facts of a deployment."""

import re
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from batchery import BatchTask, install
from batchery.cli.doctor import CHECKS, Deployment, diagnose, draw
from batchery.cli.survey import Survey
from batchery.errors import SettingsError
from batchery.transport.live_workers import RegisteredWorker

NAME = "w@here"


INFO = {
    "maxmemory_policy": "noeviction",
    "evicted_keys": 0,
    "aof_enabled": 1,
    "used_memory": 100 << 20,
    "maxmemory": 1 << 30,
}


def make_app(*, installed: bool = True) -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    if installed:
        install(app)

    @app.task(name="shout", base=BatchTask, shared=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    return app


def make_survey(**fields: Any) -> Survey:
    device = {"cpu": {"state": "ready", "batches_in_flight": 0}}
    answer = {"devices": device, "batches": {}, "clock_s": 1.0}
    return Survey(**{"workers": {NAME: answer}, "queues": {"celery": 7}, **fields})


def register(name: str | None = NAME) -> RegisteredWorker:
    return RegisteredWorker(5.0, {"celery"}, name)


def make_deployment(app: Celery | None = None, **facts: Any) -> Deployment:
    """A deployment in which nothing is wrong, but for these facts."""
    on = Deployment(app or make_app())
    healthy = {
        "infos": {"": facts.pop("info", INFO)},
        "registered": [register()],
        "consumed": {NAME: {"celery"}},
        "survey": make_survey(),
    }
    vars(on).update({**healthy, **facts})
    return on


def look(on: Deployment) -> dict[str, Any]:
    return diagnose(on, "shop")


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = look(make_deployment())
    assert found == {"findings": [], "unchecked": {}, "passed": len(CHECKS), "exit_code": 0}


@pytest.mark.parametrize(
    ("check", "facts", "text"),
    [
        (
            "redis-eviction",
            {"info": INFO | {"maxmemory_policy": "allkeys-lru", "evicted_keys": 1200}},
            "maxmemory-policy is allkeys-lru; 1,200 keys were evicted since Redis started",
        ),
        (
            "redis-memory",
            {"info": INFO | {"used_memory": 900 << 20}},
            "Redis uses 88% of its memory, which is 1,024 MiB",
        ),
        (
            "redis-memory",
            {"info": INFO | {"maxmemory": 0, "total_system_memory": 110 << 20}},
            "Redis uses 91% of its memory, which is 110 MiB",
        ),
        (
            "redis-eviction",
            {"infos": {"a:1: ": INFO, "b:2: ": INFO | {"maxmemory_policy": "allkeys-lru"}}},
            "b:2: maxmemory-policy is allkeys-lru; 0 keys were evicted since Redis started",
        ),
        (
            "worker-none",
            {"registered": [], "consumed": {}, "survey": make_survey(workers={}, queues={})},
            "no worker answers, and none is registered",
        ),
        (
            "worker-stock",
            {"consumed": {NAME: {"celery", "shout"}, "plain@here": {"shout", "mail"}}},
            "plain@here has no leases, and consumes shout",
        ),
        (
            "queue-unserved",
            {"survey": make_survey(queues={"celery": 7, "embde": 4120})},
            "4,120 jobs in queue 'embde', and no worker consumes it",
        ),
        (
            "queue-unserved",
            {"survey": make_survey(queues={"celeri": 1})},
            "1 job in queue 'celeri', and no worker consumes it, the nearest is celery",
        ),
    ],
)
def test_each_check_says_what_it_found(check: str, facts: dict[str, Any], text: str) -> None:
    found = look(make_deployment(**facts))
    assert [(each["check"], each["found"]) for each in found["findings"]] == [(check, text)]
    assert found["unchecked"] == {}


def make_node(name: str, flags: str, master: str = "-") -> dict[str, Any]:
    """A node of a cluster, as redis-py reads CLUSTER NODES."""
    slots = [] if master != "-" else [["0", "8191"]]
    return {"node_id": name, "flags": flags, "master_id": master, "slots": slots}


def test_nodes_that_are_away_or_have_no_replica_are_found() -> None:
    nodes = {
        "a:1": make_node("a", "myself,master"),
        "a:2": make_node("a2", "slave", "a"),
        "b:1": make_node("b", "master"),
        "b:2": make_node("b2", "slave,fail?", "b"),
    }
    found = look(make_deployment(nodes=nodes))["findings"]
    assert [(each["check"], each["found"]) for each in found] == [
        ("cluster-node-away", "node b:2 does not answer"),
        ("cluster-no-replica", "node b:1 has no replica"),
    ]


def test_worker_whose_name_is_not_known_yet_may_be_any() -> None:
    assert look(make_deployment(registered=[register(None)]))["findings"] == []


def test_redis_that_writes_nothing_to_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(save: str) -> list[str]:
        monkeypatch.setattr(Deployment, "read_config", lambda *_: {"": save})
        found = look(make_deployment(info=INFO | {"aof_enabled": 0}))["findings"]
        return [each["check"] for each in found]

    assert find("") == ["redis-no-persistence"]
    assert find("3600 1") == []


def test_batch_tasks_without_install_are_found() -> None:
    (finding,) = look(make_deployment(make_app(installed=False)))["findings"]
    assert finding["check"] == "app-not-installed"
    assert finding["found"].startswith("1 batch task, and install was not")


def test_app_that_a_worker_cannot_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    app.conf.batchery_max_batch_sise = 8
    (finding,) = look(make_deployment(app))["findings"]
    assert finding["check"] == "app-invalid"
    assert "max_batch_size" in finding["found"]
    app = make_app()
    app.conf.include = ["no_such_module_of_test"]
    (finding,) = look(make_deployment(app))["findings"]
    assert finding["found"].startswith(
        "ModuleNotFoundError: No module named 'no_such_module_of_test'"
    )


def test_settings_that_cannot_be_read_leave_redis_unchecked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read() -> dict[str, Any]:
        raise SettingsError("setting models.embed.kind = 'embeding'")

    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL"):
        monkeypatch.delenv(name, raising=False)
    app = Celery("models", set_as_current=False)
    app.add_defaults(read)
    found = look(Deployment(app))
    assert [each["check"] for each in found["findings"]] == ["app-invalid"]
    assert found["unchecked"].keys() >= {"redis-away", "redis-eviction", "queue-unserved"}
    assert set(found["unchecked"].values()) == {
        "the settings, which say where Redis is, cannot be read"
    }
    # A Redis that is named elsewhere is checked all the same.
    app = make_app()
    app.conf.batchery_max_batch_sise = 8
    assert look(make_deployment(app))["unchecked"] == {}


def test_check_that_cannot_be_made_says_why_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> str:
        raise redis.ResponseError("unknown command 'CONFIG'")

    monkeypatch.setattr(Deployment, "read_config", refuse)
    info = {**INFO, "aof_enabled": 0}
    del info["used_memory"]
    found = look(make_deployment(info=info))
    assert found["unchecked"] == {
        "redis-no-persistence": "Redis refuses it: unknown command 'CONFIG'",
        "redis-memory": "KeyError('used_memory')",
    }
    assert (found["exit_code"], found["passed"]) == (0, len(CHECKS) - 2)


def test_nothing_more_is_asked_once_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang(*_: Any) -> Any:
        asked.append("workers")
        raise OperationalError("timed out")

    monkeypatch.setattr("batchery.cli.doctor.survey", hang)
    on = make_deployment()
    del vars(on)["survey"]
    found = look(on)
    assert len(asked) == 1
    assert set(found["unchecked"].values()) == {"timed out"}
    assert {"queue-unserved"} <= set(found["unchecked"])


def test_errors_come_first_and_decide_the_exit_code() -> None:
    full: dict[str, Any] = {"info": INFO | {"maxmemory": 0, "total_system_memory": 110 << 20}}
    found = look(make_deployment(**full, survey=make_survey(queues={"embde": 1})))
    assert [each["severity"] for each in found["findings"]] == ["error", "warning"]
    assert found["exit_code"] == 2
    assert found["findings"][0]["fix"].startswith("celery -A shop worker -Q QUEUE ")
    assert look(make_deployment(**full))["exit_code"] == 1
    text = draw(found["findings"], {"a": "why", "b": "why"}, 5)
    assert "embde" in text
    assert re.search(r"unchecked +2 checks +why\n +a, b", text)
    assert text.endswith("5 checks found nothing wrong, 2 findings; 2 checks could not be made")
    assert draw([], {}, 7).startswith("7 checks found nothing wrong")
