"""Messages in bulk are those that `apply_async` sends: the same queue, the same content."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis
from celery import Celery, signals, signature, uuid
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError
from kombu.utils import json

from batchery import BatchArgumentError, BatchTask
from batchery_producer.publisher import CHUNK_JOBS, Publisher
from batchery_producer.template import are_alike
from support.publishing import assert_equal, bulk_app, sent_by_celery, sent_by_us, take

LATER = datetime.now(UTC) + timedelta(days=1)
TOPIC = Queue("there", Exchange("topics", type="topic"), "a.#")
LINK: Any = signature("ordinary", kwargs={"mark": "linked"})

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "queue": {"queue": "there"},
    "priority": {"priority": 3},
    "priority and queue": {"priority": 9, "queue": "there"},
    "odd priority": {"priority": 70},
    "countdown": {"countdown": 30},
    "eta": {"eta": LATER},
    "expires in": {"expires": 30},
    "expires at": {"expires": LATER},
    "headers": {"headers": {"tenant": "acme 100 %", "batchery": {"v": 1}}},
    "stamps": {"stamped_headers": ["tenant"], "tenant": "ac%me"},
    "link": {"link": LINK},
    "links": {"link": [LINK, LINK], "link_error": LINK},
    "shadow": {"shadow": "another name"},
    "limits": {"time_limit": 5, "soft_time_limit": 4},
    "reprs": {"argsrepr": "secret", "kwargsrepr": "also"},
    "ignored": {"ignore_result": True},
    "wanted": {"ignore_result": False},
    "parents": {"root_id": "the-root", "parent_id": "the-parent"},
    "group": {"group_id": "the-group", "group_index": 3},
    "retries": {"retries": 2},
    "reply_to": {"reply_to": "me"},
    "transient": {"delivery_mode": 1},
    "pickle": {"serializer": "pickle"},
    "compressed": {"compression": "zlib"},
    "correlation": {"correlation_id": "of-the-caller"},
}

ITEMS: dict[str, Any] = {
    "text": "hello",
    "empty": "",
    "quotes": 'it\'s 100 % "quoted" \\ and %(id)s',
    "unicode": "Grüße\n\t☃\u2028\x00",
    "words": "long " * 700,
    "letters": "x" * 3000,
    "just short": "x" * 1022,
    "just long": "x" * 1023,
    "list": ["one", "two"],
    "dict": {"text": "a", "n": [1, {"deep": [[[[1]]]]}]},
    "none": None,
    "true": True,
    "integer": -17,
    "float": 1.5,
    "infinity": float("inf"),
    "date": datetime(2026, 1, 2, tzinfo=UTC),
    "decimal": Decimal("1.10"),
    "bytes": b"bytes",
    "more bytes": b"\xff",
    "tuple": (1, "two"),
}


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    """On each kind of Redis in turn."""
    with bulk_app(url) as made:
        yield made


@pytest.fixture
def messages(app: Celery, bare: Any) -> Any:
    """Sends a job both ways; returns both messages, and asserts that they are equal."""

    def compare(task: str = "same", item: Any = "item", to: Celery = app, **options: Any) -> Any:
        keywords = {"mark": "50 %"}
        key, theirs = take(bare, sent_by_celery(to, task, item, keywords, **options))
        bindings = sorted(bare.smembers("_kombu.binding.there"))
        bare.flushall()
        own_key, mine = take(bare, sent_by_us(to, task, item, keywords, **options))
        assert own_key == key
        assert sorted(bare.smembers("_kombu.binding.there")) == bindings
        assert_equal(mine, theirs)
        return mine

    return compare


@pytest.mark.parametrize("name", OPTIONS)
def test_the_message_is_celerys_with_each_option(messages: Any, name: str) -> None:
    messages(**OPTIONS[name])


@pytest.mark.parametrize("task", ["same", "limited", "hasty", "shadowed", "ordinary"])
def test_the_message_is_celerys_for_each_task(messages: Any, task: str) -> None:
    messages(task)


@pytest.mark.parametrize("name", ITEMS)
def test_the_message_is_celerys_for_each_item(messages: Any, name: str) -> None:
    messages(item=ITEMS[name])


def test_most_messages_are_made_of_a_template(app: Celery) -> None:
    assert all(are_alike(app, task) for task in ("same", "limited", "hasty", "stranger"))
    assert not are_alike(app, "shadowed")


@pytest.mark.parametrize(
    "conf",
    [
        {"task_routes": {"sa*": {"queue": "there", "priority": 6}}},
        {"task_routes": (lambda *_, **__: {"queue": "there"},)},
        {"task_default_queue": "mine"},
        {"task_queues": [TOPIC], "task_routes": {"*": {"queue": "there", "routing_key": "a.b"}}},
        {"task_protocol": 1},
        {"task_serializer": "pickle"},
        {"task_default_priority": 9},
        {"task_default_delivery_mode": "transient"},
        {"broker_transport_options": {"global_keyprefix": "mine.", "priority_steps": [0, 5]}},
        {"task_ignore_result": True},
    ],
    ids=lambda conf: next(iter(conf)),
)
def test_the_message_is_celerys_with_each_setting(url: str, messages: Any, conf: Any) -> None:
    with bulk_app(url, **conf) as app:
        if conf.get("task_protocol") == 1:
            with pytest.raises(KeyError):  # Nothing is in its headers; so `take` cannot read it.
                messages(to=app)
        else:
            messages("ordinary", to=app)
            messages("same", to=app, priority=5)


def test_a_task_that_is_not_registered_is_sent_by_name(app: Celery, bare: Any) -> None:
    task_id = uuid()
    app.send_task("stranger", ("item",), queue="there", task_id=task_id)
    key, theirs = take(bare, task_id)
    own_key, mine = take(bare, sent_by_us(app, "stranger", "item", {}, queue="there"))
    assert own_key == key
    assert_equal(mine, theirs)


def test_jobs_are_taken_in_the_order_in_which_they_are_sent(app: Celery, bare: Any) -> None:
    ids = [uuid() for _ in range(CHUNK_JOBS + 10)]
    with Publisher(app, "same") as publisher:
        publisher.send([(task_id, task_id) for task_id in ids])
        assert publisher.sent == len(ids)
    found = [json.loads(raw) for raw in bare.lrange("same", 0, -1)]
    assert [each["headers"]["id"] for each in reversed(found)] == ids
    assert len({each["properties"]["delivery_tag"] for each in found}) == len(ids)


def test_nothing_stays_behind_and_nothing_is_subscribed_to(app: Any, bare: Any) -> None:
    with Publisher(app, "same", queue="there") as publisher:
        publisher.send([(uuid(), "item")])
    known = {b"there", b"_kombu.binding.there", b"_kombu.binding_permanent.there"}
    assert set(bare.keys()) == known
    assert app.backend.result_consumer._pubsub is None


def test_an_item_that_json_cannot_write_sends_nothing(app: Celery, bare: Any) -> None:
    with Publisher(app, "same") as publisher, pytest.raises(EncodeError, match="item <object"):
        publisher.send([(uuid(), "good"), (uuid(), object())])
    assert not bare.exists("same")


def test_options_of_one_job_are_refused(app: Celery) -> None:
    with pytest.raises(BatchArgumentError, match="task_id"):
        Publisher(app, "same", task_id="mine")


def test_a_call_that_the_task_does_not_take_is_refused(app: Celery) -> None:
    with (
        Publisher(app, "same", keywords={"colour": "red"}) as publisher,
        pytest.raises(TypeError, match="colour"),
    ):
        publisher.send([(uuid(), "item")])


def test_who_listens_to_publishing_sees_and_changes_each_message(app: Celery, bare: Any) -> None:
    seen: list[Any] = []

    def before(headers: Any = None, body: Any = None, **_: Any) -> None:
        headers["trace"] = f"trace of {body[0][0]}"

    def after(headers: Any = None, routing_key: str = "", **_: Any) -> None:
        seen.append((headers["id"], routing_key))

    signals.before_task_publish.connect(before, sender="same")
    signals.after_task_publish.connect(after, sender="same")
    try:
        with Publisher(app, "same") as publisher:
            publisher.send([("a", "one"), ("b", "two")])
    finally:
        signals.before_task_publish.disconnect(before, sender="same")
        signals.after_task_publish.disconnect(after, sender="same")
    assert seen == [("a", "same"), ("b", "same")]
    found = [json.loads(raw) for raw in bare.lrange("same", 0, -1)]
    assert [each["headers"]["trace"] for each in found] == ["trace of two", "trace of one"]


def events_of(app: Celery, bare: Any, jobs: list[tuple[str, Any]], task: str) -> list[Any]:
    """The events that are told when jobs are sent, as Celery's receiver reads them."""
    told: list[Any] = []
    with app.connection_for_read() as connection:
        receiver: Any = app.events.Receiver(connection, handlers={"task-sent": told.append})
        with bare.pubsub(ignore_subscribe_messages=True) as channel:
            channel.psubscribe("*celeryev*")
            channel.get_message(timeout=10)
            with Publisher(app, task, queue="there") as publisher:
                publisher.send(jobs)
            while len(told) < len(jobs):
                while (message := channel.get_message(timeout=10)) is None:
                    pass
                content = json.loads(message["data"])
                body = app.backend.decode(receiver.channel.decode_body(content["body"], "base64"))
                receiver._receive(body, None)
    return told


def test_events_tell_of_each_job_where_they_are_wanted(url: str, bare: Any) -> None:
    with bulk_app(url, task_send_sent_event=True) as app:
        told = events_of(app, bare, [("a", "one"), ("b", "two")], "same")
    info = [(each["uuid"], each["root_id"], each["args"], each["queue"]) for each in told]
    assert info == [("a", "a", "('one',)", "there"), ("b", "b", "('two',)", "there")]
    assert {(each["name"], each["retries"], each["exchange"]) for each in told} == {("same", 0, "")}
    assert told[0]["clock"] < told[1]["clock"]


def test_a_queue_that_expires_expires(url: str, bare: Any) -> None:
    queues = [Queue("there", expires=60)]
    with bulk_app(url, task_queues=queues) as app, Publisher(app, "same", queue="there") as sender:
        sender.send([(uuid(), "one"), (uuid(), "two")])
    assert 0 < bare.ttl("there") <= 60
    assert bare.llen("there") == 2


def test_a_task_with_an_apply_async_of_its_own_sends_each_job_itself(
    app: Any, bare: redis.Redis
) -> None:
    class Own(BatchTask):
        name = "own"

        def run(self, items: list[Any]) -> list[Any]:
            return items

        def apply_async(self, args: Any = None, *rest: Any, **options: Any) -> Any:
            return super().apply_async((f"own {args[0]}",), *rest, **options)

    app.register_task(Own())
    assert not are_alike(app, "own")
    _, message = take(bare, sent_by_us(app, "own", "item", {}))
    assert message["body"][0] == ["own item"]
