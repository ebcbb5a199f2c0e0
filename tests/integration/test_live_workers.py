"""Who may consume a queue, as each kind of server tells it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from batchery.transport import Transport, live_workers
from batchery.transport.live_workers import LiveWorkers
from batchery.transport.redis_schema import REPLIES_CLIENT
from support.harness import wait_for


@pytest.fixture
def live(url: str) -> LiveWorkers:
    with Connection(url, transport=Transport) as connection:
        found = LiveWorkers.of(connection, 5)
    assert found is not None
    return found


@contextmanager
def popped(url: str, **options: Any) -> Iterator[None]:
    """A connection that has waited for messages."""
    with Redis.from_url(url, single_connection_client=True, **options) as one:
        one.brpop(["nothing"], timeout=0.05)
        yield


def test_connection_that_waits_may_be_a_worker(url: str, live: LiveWorkers) -> None:
    wait_for(lambda: not live.may_be_others(), "those of earlier tests are gone")
    with popped(url):
        assert live.may_be_others()
    wait_for(lambda: not live.may_be_others(), "it is gone")
    with popped(url.removesuffix("/0") + "/3"), popped(url, client_name=REPLIES_CLIENT):
        assert not live.may_be_others()


def test_connection_that_waited_long_ago_is_one_only_if_messages_are_held(
    url: str, live: LiveWorkers, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_workers, "MAX_IDLE_S", 0)
    with popped(url):
        assert not live.may_be_others()
        bare.zadd("unacked_index", {"message": 1})
        assert live.may_be_others()


def test_who_may_not_look_knows_nothing(url: str, bare: Any) -> None:
    bare.execute_command("ACL", "SETUSER", "blind", "on", ">x", "~*", "&*", "+@all", "-client")
    with Connection(url.replace("redis://", "redis://blind:x@"), transport=Transport) as connection:
        found = LiveWorkers.of(connection, 5)
    assert found is not None
    assert found.may_be_others()
    bare.execute_command("ACL", "DELUSER", "blind")


def test_other_brokers_are_not_known() -> None:
    with Connection("memory://") as connection:
        assert LiveWorkers.of(connection, 5) is None
