"""What tests of publishing share: an app of tasks that differ, and messages as people read them."""

import base64
import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from celery import Celery, uuid
from kombu.serialization import loads

from batchery import BatchTask, install
from batchery.protocol.headers import SENT_AT
from batchery_producer.publisher import Publisher

#: Of one job alone.
OWN = ("id", "root_id", "correlation_id", "delivery_tag")
TIMES = ("eta", "expires")
ACCEPT = {"application/json", "application/x-python-serialize"}


def shadow(_: Any, args: Any, *__: Any) -> str:
    return f"about {args[0]}"


@contextlib.contextmanager
def bulk_app(url: str, **conf: Any) -> Iterator[Celery]:
    """An app with tasks that Celery sends in different ways; nothing of it is left behind."""
    app: Any = install(Celery("bulk", broker=url, backend=url, set_as_current=False))
    app.conf.update(conf)

    def same(items: list[Any], mark: str = "") -> list[Any]:
        return items

    def batch(name: str, **options: Any) -> None:
        app.task(shared=False, base=BatchTask, name=name, **options)(same)

    batch("same")
    batch("limited", time_limit=9, soft_time_limit=8)
    batch("hasty", expires=60, ignore_result=True, serializer="pickle")
    batch("shadowed", shadow_name=shadow)
    app.task(shared=False, name="ordinary")(same)
    try:
        yield app
    finally:
        app.backend.result_consumer.stop()
        app.close()


def sent_by_celery(app: Any, task: str, item: Any, keywords: Any, **options: Any) -> str:
    """Sends one job as people do, without a subscription; returns its id."""
    task_id = uuid()
    # A connection remembers which queues it has declared: this one knows of none.
    with app.connection_for_write() as connection:
        options |= {"task_id": task_id, "connection": connection}
        app.tasks[task].apply_async((item,), keywords, **options)
    return task_id


def sent_by_us(app: Celery, task: str, item: Any, keywords: Any, **options: Any) -> str:
    """The same, by the publisher."""
    task_id = uuid()
    with Publisher(app, task, keywords=keywords, **options) as publisher:
        publisher.send([(task_id, item)])
    return task_id


def take(bare: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    """Takes the only message there is; returns the key of its list, and what it says."""
    keys = [key for key in bare.scan_iter("*") if bare.type(key) == b"list"]
    assert len(keys) == 1
    (raw,) = bare.lrange(keys[0], 0, -1)
    bare.delete(keys[0])
    return keys[0].decode(), readable(json.loads(raw), task_id)


def readable(message: dict[str, Any], task_id: str) -> dict[str, Any]:
    """A message without its coats, and with a word in the place of what is its own."""
    headers, properties = message["headers"], message["properties"]
    body = base64.b64decode(message["body"])
    compressed = headers.get("compression")
    if compressed is None:
        kind, encoding = message["content-type"], message["content-encoding"]
        message["body"] = loads(body, kind, encoding, accept=ACCEPT)
    for place in (headers, properties):
        for name in OWN:
            if place.get(name) == task_id:
                place[name] = "its own id"
    assert properties.pop("delivery_tag") != task_id
    for name in TIMES:
        if headers.get(name):
            headers[name] = datetime.fromisoformat(headers[name])
    return message


def assert_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same, but for the moment at which each was made, and the header that says it."""
    assert isinstance(mine["headers"].pop(SENT_AT), float)
    theirs["headers"].pop(SENT_AT, None)
    for name in TIMES:
        mine_at, their_at = mine["headers"].pop(name), theirs["headers"].pop(name)
        assert (mine_at is None) == (their_at is None), name
        if mine_at is not None:
            assert abs((mine_at - their_at).total_seconds()) < 20, name
    expirations = [each["properties"].pop("expiration", None) for each in (mine, theirs)]
    if None in expirations:
        assert expirations == [None, None]
    else:
        assert abs(int(expirations[0]) - int(expirations[1])) < 20_000
    assert repr(mine) == repr(theirs)
