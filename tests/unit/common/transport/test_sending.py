"""Messages of a completion that runs twice: what was sent before is not sent again."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kombu
import pytest

from batchery.transport.keys import Keys
from batchery.transport.sending import Sending, sending_once
from plain_kombu import OURS, queue_of

KNOWN = {"job": "parent", "next": {"chain": [{"options": {"task_id": "step"}}]}}


def message(task_id: str, body: str = "[]", task: str = "work", retries: int = 0) -> dict[str, Any]:
    return {"headers": {"id": task_id, "task": task, "retries": retries}, "body": body}


def marks(*messages: dict[str, Any]) -> list[str]:
    sending = Sending("tag", KNOWN)
    return [sending.mark(each) for each in messages]


def test_what_has_an_id_already_is_told_by_it() -> None:
    assert marks(message("step", "[1]")) == marks(message("step", "[2]"))
    assert len(set(marks(message("step"), message("parent"), message("parent")))) == 2
    assert marks(message("parent", retries=1)) != marks(message("parent", retries=2))
    assert marks(message("parent", task="another")) != marks(message("parent"))


def test_what_gets_a_new_id_each_time_is_told_by_its_body() -> None:
    assert marks(message("new-1", "[1]")) == marks(message("new-2", "[1]"))
    assert marks(message("new-1", "[1]")) != marks(message("new-2", "[2]"))
    # Two equal callbacks are two, and the same two when the job runs again.
    first = marks(message("new-1"), message("new-2"))
    assert len(set(first)) == 2
    assert first == marks(message("new-3"), message("new-4"))


def test_what_kombu_sends_again_is_the_same_message() -> None:
    assert len(set(marks(message("new-1"), message("new-1")))) == 1


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
            queue = queue_of("q")
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


def test_a_second_run_sends_only_what_the_first_did_not(send: Send, bare: Any, prefix: str) -> None:
    for sent in (["step"], ["step", "parent"]):
        with sending_once("tag", KNOWN) as sending:
            assert sending is not None
            for task_id in sent:
                send(task_id)
            assert sending.is_marked
    waiting = [json.loads(each)["headers"]["id"] for each in bare.lrange(f"{prefix}q", 0, -1)]
    assert waiting == ["parent", "step"]
    key = Keys(prefix).sent("tag")
    assert bare.scard(key) == 2
    assert bare.ttl(key) > 0


def test_another_job_and_no_job_send_as_they_like(send: Send, bare: Any, prefix: str) -> None:
    for tag in ("tag", "another", None, None):
        with sending_once(tag, KNOWN):
            send("step")
    send("step")
    assert bare.llen(f"{prefix}q") == 5


def test_what_redis_refuses_leaves_no_mark(send: Send, bare: Any, prefix: str) -> None:
    bare.set(f"{prefix}q", "no list")
    with sending_once("tag", KNOWN), pytest.raises(Exception, match="WRONGTYPE"):
        send("step")
    assert not bare.exists(Keys(prefix).sent("tag"))
    bare.delete(f"{prefix}q")
    with sending_once("tag", KNOWN):
        send("step")
    assert bare.llen(f"{prefix}q") == 1


def test_who_has_lost_the_job_sends_nothing(send: Send, bare: Any, prefix: str) -> None:
    lease = (SimpleNamespace(lease_key=Keys(prefix).lease("me")), "7")
    for held in (True, False):
        bare.delete(Keys(prefix).sent("tag"), Keys(prefix).lease("me"))
        if held:
            bare.hset(Keys(prefix).lease("me"), "7", "the job's message")
        with sending_once("tag", KNOWN, lease):
            send("step")
        assert bare.llen(f"{prefix}q") == 1
