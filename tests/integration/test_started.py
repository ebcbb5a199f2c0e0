"""The state STARTED as a device stores it: what it says, what it leaves alone, and no waiting."""

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.states import EXCEPTION_STATES, STARTED

from batchery import BatchTask, install
from batchery_worker.device.started import StartedStates
from batchery_worker.work import Work
from conftest import flush
from support.harness import open_redis, wait_for
from support.own_redis import OwnRedis

# Celery's own backend calls it.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


@pytest.fixture
def make_app(redis_url: str) -> Iterator[Any]:
    flush(redis_url)
    apps: list[Celery] = []

    def make(url: str = redis_url, **conf: Any) -> Celery:
        app = install(Celery("started", broker=url, backend=url, set_as_current=False))
        app.conf.update({"task_track_started": True, **conf})
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


def same(items: list[Any]) -> list[Any]:
    return items


def choose_task(app: Celery, **options: Any) -> None:
    decorate: Any = app.task(base=BatchTask, shared=False, name="shout", **options)
    decorate(same)


#: Headers of a message, as a worker has read them.
HEADERS: dict[str, Any] = {
    "task": "shout",
    "retries": 0,
    "hostname": "worker@host",
    "delivery_info": {"exchange": "", "routing_key": "celery", "priority": 0},
    "args": ["a"],
    "kwargs": {"loud": True},
}


def build_work_name(*messages: dict[str, Any]) -> Work:
    return Work(
        id=1,
        task="shout",
        keywords=HEADERS["kwargs"],
        jobs=[(each["id"], each["args"], False) for each in messages],
        max_batch_size=8,
        max_batch_tokens=None,
        contexts=messages,
    )


def message(task_id: str, **headers: Any) -> dict[str, Any]:
    return {**HEADERS, "id": task_id, **headers}


def stored(app: Celery, task_id: str) -> Any:
    """What is stored, as any client decodes it."""
    backend: Any = app.backend
    value = backend.client.get(backend.get_key_for_task(task_id))
    return value and backend.decode(value)


SHAPES: list[dict[str, Any]] = [
    {},
    {"group": "g1", "group_index": 2, "parent_id": "p1", "root_id": "r1"},
    {"retries": 3, "stamped_headers": ["tenant"], "stamps": {"tenant": "blue"}},
    {"args": ["\ud800 'half' \u2028\0"]},
]


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize(
    "conf",
    [{}, {"result_serializer": "yaml", "result_accept_content": ["yaml"]}],
    ids=["by us", "by Celery"],
)
def test_a_device_stores_what_celery_would(
    make_app: Any, conf: dict[str, Any], extended: bool
) -> None:
    app = make_app(result_extended=extended, result_expires=77, **conf)
    choose_task(app)
    messages = [message(f"job-{number}", **shape) for number, shape in enumerate(SHAPES)]
    meta = {"pid": os.getpid(), "hostname": "worker@host"}
    for each in messages:
        app.backend.store_result(f"stock-{each['id']}", meta, STARTED, request=Context(each))
    StartedStates(app).store(build_work_name(*messages))
    for each in messages:
        theirs = stored(app, f"stock-{each['id']}")
        assert stored(app, each["id"]) == {**theirs, "task_id": each["id"]}
        result = app.AsyncResult(each["id"])
        assert (result.state, result.info) == ("STARTED", meta)
        backend: Any = app.backend
        assert 0 < backend.client.ttl(backend.get_key_for_task(each["id"])) <= 77


def test_a_result_is_never_overwritten_and_any_other_state_is(make_app: Any) -> None:
    app = make_app()
    choose_task(app)
    ends, others = ("SUCCESS", "FAILURE", "REVOKED"), ("RETRY", "PROGRESS")
    for state in (*ends, *others):
        error = ValueError("before") if state in EXCEPTION_STATES else "before"
        app.backend.store_result(state, error, state)
    StartedStates(app).store(build_work_name(*map(message, (*ends, *others))))
    states = [app.AsyncResult(each).state for each in (*ends, *others)]
    assert states == [*ends, "STARTED", "STARTED"]


def test_nothing_is_stored_for_those_who_want_nothing(make_app: Any) -> None:
    app = make_app()
    choose_task(app)
    StartedStates(app).store(build_work_name(message("quiet", ignore_result=True), message("loud")))
    assert stored(app, "quiet") is None
    assert stored(app, "loud")["status"] == "STARTED"
    choose_task(other := make_app(), track_started=False)
    StartedStates(other).store(build_work_name(message("untracked")))
    assert stored(app, "untracked") is None


def test_one_round_trip_for_a_batch(make_app: Any, own_redis: OwnRedis) -> None:
    app = make_app(own_redis.url)
    choose_task(app)
    states = StartedStates(app)
    states.store(build_work_name(message("first")))
    with open_redis(own_redis.url) as redis:
        before = redis.info("commandstats")
        states.store(build_work_name(*(message(f"many-{number}") for number in range(50))))
        after = redis.info("commandstats")
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    assert calls["cmdstat_evalsha"] == 1
    assert calls["cmdstat_publish"] == 50


def test_a_backend_that_is_away_holds_nobody_up(
    make_app: Any, own_redis: OwnRedis, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(own_redis.url)
    choose_task(app)
    states = StartedStates(app)
    states.store(build_work_name(message("before")))
    own_redis.kill()

    def took_s() -> float:
        began_s = time.monotonic()
        states.store(build_work_name(message("meanwhile")))
        return time.monotonic() - began_s

    with caplog.at_level(logging.WARNING, "batchery.device"):
        # The machine may be held up once.
        assert any(took_s() < 5 for _ in range(3))
    line = caplog.messages[0]
    assert line.startswith("the state STARTED of 1 job of shout cannot be stored: Connection")
    own_redis.start()

    def is_stored() -> bool:
        states.store(build_work_name(message("after")))
        return stored(app, "after") is not None

    wait_for(is_stored, "it is stored again")
    assert stored(app, "after")["status"] == "STARTED"
