"""Events are what Celery's own dispatcher sends, whichever way they are encoded."""

import json
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from celery.events.dispatcher import EventDispatcher
from kombu import serialization as kombu_serialization
from kombu.utils.json import JSONEncoder, loads

from batchery_worker import events as events_module
from batchery_worker.events import MAX_EVENTS, BatchEvents, use_batch_events

NOW_S = 1_700_000_000.25

#: Not everything is in its stubs.
serialization: Any = kombu_serialization


class Producer:
    """Keeps what is published, as kombu would encode it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Any]] = []
        #: Which of them came encoded.
        self.encoded: list[bool] = []

    def publish(
        self,
        body: Any,
        *,
        routing_key: str,
        content_type: str = "",
        content_encoding: str = "",
        serializer: str = "",
        **_: Any,
    ) -> None:
        self.encoded.append(bool(content_type))
        if not content_type:
            content_type, content_encoding, body = serialization.dumps(body, serializer)
        value = serialization.loads(body, content_type, content_encoding, force=True)
        self.sent.append((routing_key, content_type, value))


@pytest.fixture
def app() -> Any:
    return Celery("events", broker="memory://", set_as_current=False)


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "time", lambda: NOW_S)
    monkeypatch.setattr("time.time", lambda: NOW_S)


def dispatcher(app: Any, kind: type = BatchEvents, **options: Any) -> Any:
    given = {"buffer_group": ["task"], "hostname": "worker@here", **options}
    made = kind(app.connection_for_write(), app=app, **given)
    made.producer = Producer()
    return made


def exchange(app: Any, kind: type) -> list[tuple[str, str, Any]]:
    """What a monitor receives of a dispatcher of this kind."""
    app.clock.value = 0
    events = dispatcher(app, kind)
    events.send("task-received", uuid="1", name="shout", args="('ä',)", eta=None, retries=0)
    events.send("task-started", uuid="1")
    events.send("task-succeeded", uuid="1", result="'Ä'", runtime=0.25, batch={"size": 2})
    events.send("worker-heartbeat", freq=2.0, active=0)
    events.flush()
    sent: list[tuple[str, str, Any]] = events.producer.sent
    return sent


def test_monitors_receive_what_celery_sends(app: Any) -> None:
    ours, celerys = exchange(app, BatchEvents), exchange(app, EventDispatcher)
    assert [key for key, _, _ in ours] == ["worker.heartbeat", "task.multi"]
    for _, _, events in (*ours, *celerys):
        for event in events if isinstance(events, list) else [events]:
            # Counted at different moments: a heartbeat's is looked at by Celery itself.
            assert event.pop("timestamp") > 0
    assert ours == celerys


@pytest.mark.parametrize(
    "odd",
    [Decimal("1.5"), {"within": Decimal(2)}, [1, 2], {1: "a number"}, type("Text", (str,), {})()],
    ids=["a decimal", "one within", "a list", "a key that is no text", "a subclass"],
)
def test_what_is_not_plain_is_encoded_by_kombu(app: Any, odd: Any) -> None:
    events = dispatcher(app)
    events.send("task-custom", uuid="1", odd=odd)
    events.flush()
    assert events.producer.encoded == [False]
    ((_, _, (event,)),) = events.producer.sent
    assert event["odd"] == loads(json.dumps(odd, cls=JSONEncoder))


def test_a_batch_of_events_leaves_at_once_and_no_more_are_kept(app: Any) -> None:
    asked: list[None] = []
    events = dispatcher(app, on_send_buffered=lambda: asked.append(None))
    for _ in range(MAX_EVENTS - 1):
        events.send("task-started", uuid="1")
    assert events.producer.sent == []
    assert len(asked) == MAX_EVENTS - 1
    events.send("task-started", uuid="1")
    assert len(events.producer.sent[0][2]) == MAX_EVENTS


def test_groups_that_nobody_wants_are_not_sent(app: Any) -> None:
    events = dispatcher(app, groups=["worker"])
    events.send("task-started", uuid="1")
    events.flush()
    assert events.producer.sent == []
    events.groups.add("task")
    events.send("task-started", uuid="1")
    events.flush()
    assert len(events.producer.sent) == 1
    events.enabled = False
    events.send("task-started", uuid="1")
    events.flush()
    assert len(events.producer.sent) == 1


def test_a_dispatcher_of_the_apps_own_stays(app: Any) -> None:
    app.events.dispatcher_cls = "celery.events:EventDispatcher"
    use_batch_events(app)
    assert not issubclass(app.events.Dispatcher, BatchEvents)
