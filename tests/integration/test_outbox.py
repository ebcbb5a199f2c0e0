"""Messages of a completion that runs twice: what was sent before is not sent again."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kombu
import pytest

from batchery.completion import JobCompletion, Outbox, completing
from batchery.transport.redis_schema import Keys
from support.plain_kombu import OURS, find_queue

KNOWN = {"job": "parent", "next": {"chain": [{"options": {"task_id": "step"}}]}}


def publishing(tag: str | None, lease: Any = None) -> Any:
    """Makes this thread complete a job; one without a tag came over another transport."""
    outbox = None if tag is None else Outbox(tag, KNOWN, lease)
    return completing(JobCompletion(outbox=outbox))


Send = Callable[[str], None]


@pytest.fixture(params=["", "mine:"], ids=["bare", "prefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def send(url: str, prefix: str) -> Iterator[Send]:
    options = {"global_keyprefix": prefix, "priority_steps": [0, 9]}
    with (
        kombu.Connection(url, transport=OURS, transport_options=options) as connection,
        connection.Producer() as producer,
    ):

        def publish(task_id: str, **more: Any) -> None:
            headers = {"id": task_id, "task": "work", "retries": 0}
            queue = find_queue("q")
            producer.publish(
                task_id,
                headers=headers,
                exchange=queue.exchange,
                routing_key="q",
                declare=[queue],
                serializer="json",
                **more,
            )

        yield publish


def test_second_run_publishes_only_messages_that_the_first_did_not(
    send: Send, bare: Any, prefix: str
) -> None:
    for sent in (["step"], ["step", "parent"]):
        with publishing("tag") as completion:
            for task_id in sent:
                send(task_id)
            assert completion.outbox.has_dedupe_keys
    waiting = [json.loads(each)["headers"]["id"] for each in bare.lrange(f"{prefix}q", 0, -1)]
    assert waiting == ["parent", "step"]
    key = Keys(prefix).dedupe_keys("tag")
    assert bare.scard(key) == 2
    assert bare.ttl(key) > 0


def test_messages_of_other_jobs_and_outside_of_jobs_are_published(
    send: Send, bare: Any, prefix: str
) -> None:
    for tag in ("tag", "another", None, None):
        with publishing(tag):
            send("step")
    send("step")
    assert bare.llen(f"{prefix}q") == 5


def test_message_that_redis_refuses_leaves_no_dedupe_key(
    send: Send, bare: Any, prefix: str
) -> None:
    bare.set(f"{prefix}q", "no list")
    with publishing("tag"), pytest.raises(Exception, match="WRONGTYPE"):
        send("step")
    assert not bare.exists(Keys(prefix).dedupe_keys("tag"))
    bare.delete(f"{prefix}q")
    with publishing("tag"):
        send("step")
    assert bare.llen(f"{prefix}q") == 1


def test_worker_without_the_lease_publishes_nothing(send: Send, bare: Any, prefix: str) -> None:
    lease = (SimpleNamespace(lease_key=Keys(prefix).lease("me")), "7")
    for held in (True, False):
        bare.delete(Keys(prefix).dedupe_keys("tag"), Keys(prefix).lease("me"))
        if held:
            bare.hset(Keys(prefix).lease("me"), "7", "the job's message")
        with publishing("tag", lease):
            send("step")
        assert bare.llen(f"{prefix}q") == 1
