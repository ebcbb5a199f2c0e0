"""What a device stores of a job is what Celery would store: the same fields, the same values."""

import json
import uuid
from datetime import datetime
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.commit.committer import JobResult, MetaWriter, stored_fields
from batchery_worker.plain_values import plain_json

FACTS = {"id": "b7", "size": 3, "padding": 0.25, "forward_ms": 1.5, "device": "cpu"}

#: As a message has them, once Celery's request has read it.
PLAIN: dict[str, Any] = {
    "lang": "py",
    "task": "tasks.shout",
    "id": "5f3b",
    "shadow": None,
    "eta": None,
    "group": None,
    "group_index": None,
    "retries": 0,
    "timelimit": [None, None],
    "root_id": "5f3b",
    "parent_id": None,
    "argsrepr": "('hello',)",
    "ignore_result": False,
    "stamped_headers": None,
    "stamps": {},
    "hostname": "worker@host",
    "delivery_info": {"exchange": "", "routing_key": "celery", "priority": 0, "redelivered": None},
    "args": ["hello"],
    "kwargs": {"sharp": True, "when": datetime(2026, 1, 2, 3, 4)},
}

SHAPES: list[dict[str, Any]] = [
    {},
    {"group": "g1", "group_index": 2},
    {"parent_id": "p1", "root_id": "r1"},
    {"group": "g1", "parent_id": "p1"},
    {"retries": 3, "shadow": "another name"},
    {"stamped_headers": ["tenant"], "stamps": {"tenant": "blue", "internal": "kept back"}},
    {"stamped_headers": None, "stamps": {"tenant": "blue"}},
    {"delivery_info": None},
    {"args": ["\ud800 'half' \u2028\0", [1.5, None]], "kwargs": {}},
]


def app(**conf: Any) -> Celery:
    made = Celery("meta", backend="redis://localhost:1", set_as_current=False)
    made.conf.update(conf)
    return made


def by_celery(app: Celery, message: dict[str, Any], result: Any) -> Any:
    """What the stock backend would send to Redis, as a reader decodes it."""
    backend: Any = app.backend
    request = Context(message, args=message["args"], kwargs=message["kwargs"])
    meta = backend._get_result_meta(result, "SUCCESS", None, request)
    meta["task_id"] = message["id"]
    return json.loads(backend.encode(meta))


def by_us(app: Celery, message: dict[str, Any], result: Any) -> tuple[Any, bytes]:
    fields = stored_fields(
        message, ignores_result=False, extended=app.conf.find_value_for_key("extended", "result")
    )
    assert fields is not None
    writer = MetaWriter(app.now().isoformat(), FACTS)
    written = writer.write(JobResult(message["id"], plain_json(result)), 12.345, fields)
    return json.loads(written), written


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("change", SHAPES, ids=str)
def test_the_stored_fields_are_celery_s_own(change: dict[str, Any], extended: bool) -> None:
    client = app(result_extended=extended)
    message = {**PLAIN, **change}
    theirs = by_celery(client, message, {"label": "x"})
    ours, written = by_us(client, message, {"label": "x"})
    assert written.startswith(b'{"status": "SUCCESS"')
    assert ours.pop("batch") == {**FACTS, "waited_ms": 12.345}
    assert type(datetime.fromisoformat(theirs.pop("date_done"))) is type(
        datetime.fromisoformat(ours.pop("date_done"))
    )
    assert ours == theirs


@pytest.mark.parametrize("zone", [{}, {"timezone": "Europe/Berlin"}, {"enable_utc": False}])
def test_the_date_is_spelled_as_celery_spells_it(zone: dict[str, Any]) -> None:
    client = app(**zone)
    theirs = by_celery(client, PLAIN, 1)["date_done"]
    ours = by_us(client, PLAIN, 1)[0]["date_done"]
    assert len(ours.partition("+")[2]) == len(theirs.partition("+")[2])
    assert datetime.fromisoformat(ours).utcoffset() == datetime.fromisoformat(theirs).utcoffset()


Plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(result=Plain, task_id=st.text(min_size=1) | st.uuids().map(str))
def test_result_writer_writes_any_result_and_any_id(result: Any, task_id: str) -> None:
    writer = MetaWriter("2026-01-02T03:04:05.000006+00:00", FACTS)
    meta = json.loads(writer.write(JobResult(task_id, plain_json(result)), 0.0, {}))
    assert (meta["result"], meta["task_id"]) == (result, task_id)


@pytest.mark.parametrize(
    ("header", "task", "stored"),
    [(None, False, True), (None, True, False), (True, False, False), (False, True, True)],
)
def test_ignore_result_is_the_message_s_before_the_task_s(
    header: bool | None, task: bool, stored: bool
) -> None:
    message = {**PLAIN, "ignore_result": header, "id": str(uuid.uuid4())}
    fields = stored_fields(message, ignores_result=task, extended=False)
    assert (fields is not None) == stored
