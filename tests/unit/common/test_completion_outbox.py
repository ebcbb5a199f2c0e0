"""The outbox of one job: what it holds back, what it replays, and how it names messages."""

from typing import Any

import pytest

from batchery.completion import HeldMessage, Lease, LeaseHolder, Outbox

KNOWN = {"job": "parent", "next": {"chain": [{"options": {"task_id": "step"}}]}}


class FakeChannel:
    """Remembers what was published, in the list of everything that happened."""

    def __init__(self, log: list[str], *, beside: bool = True) -> None:
        self._log, self._beside = log, beside
        self.fails = False

    def is_beside(self, holder: LeaseHolder) -> bool:
        return self._beside

    def publish_once(
        self, tag: str, dedupe_key: str, held: HeldMessage, lease: Lease | None
    ) -> None:
        if self.fails:
            raise ConnectionError
        self._log.append(f"{held.queue_key} {dedupe_key}" + (" leased" if lease else ""))


class Holder:
    """A worker with leases."""

    client = None
    lease_key = "lease:worker"


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def outbox() -> Outbox:
    return Outbox("tag", KNOWN, task_id="parent")


def message(task_id: str, body: str = "[]", task: str = "work", retries: int = 0) -> dict[str, Any]:
    return {"headers": {"id": task_id, "task": task, "retries": retries}, "body": body}


def held(log: list[str], task_id: str) -> HeldMessage:
    return HeldMessage(FakeChannel(log), "queue", message(task_id))


def dedupe_keys(*messages: dict[str, Any]) -> list[str]:
    outbox, log = Outbox("tag", KNOWN), list[str]()
    for each in messages:
        outbox.publish(HeldMessage(FakeChannel(log), "queue", each))
    return log


def test_message_with_a_known_id_is_named_by_id_task_and_retries() -> None:
    assert dedupe_keys(message("step", "[1]")) == dedupe_keys(message("step", "[2]"))
    assert len(set(dedupe_keys(message("step"), message("parent")))) == 2
    assert dedupe_keys(message("parent", retries=1)) != dedupe_keys(message("parent", retries=2))
    assert dedupe_keys(message("parent", task="another")) != dedupe_keys(message("parent"))


def test_message_with_a_new_id_is_named_by_its_body() -> None:
    assert dedupe_keys(message("new-1", "[1]")) == dedupe_keys(message("new-2", "[1]"))
    assert dedupe_keys(message("new-1", "[1]")) != dedupe_keys(message("new-2", "[2]"))


def test_equal_messages_have_different_names_which_a_second_run_repeats() -> None:
    first = dedupe_keys(message("new-1"), message("new-2"))
    assert len(set(first)) == 2
    assert first == dedupe_keys(message("new-3"), message("new-4"))


def test_a_message_that_was_refused_keeps_its_name(outbox: Outbox, log: list[str]) -> None:
    channel = FakeChannel(log)
    again = HeldMessage(channel, "queue", message("new"))
    channel.fails = True
    with pytest.raises(ConnectionError):
        outbox.publish(again)
    channel.fails = False
    outbox.publish(again)
    assert log == [f"queue {dedupe_keys(message('new'))[0].removeprefix('queue ')}"]


def test_what_goes_to_another_server_is_not_held_and_needs_no_lease(log: list[str]) -> None:
    outbox = Outbox("tag", KNOWN, (Holder(), "7"), task_id="parent")
    outbox.publish(held(log, "step"))
    outbox.holds = True
    elsewhere = FakeChannel(log, beside=False)
    outbox.publish(HeldMessage(elsewhere, "queue", message("parent")))
    assert log == ["queue id step work 0 1 leased", "queue id parent work 0 1"]
    assert not outbox.messages
