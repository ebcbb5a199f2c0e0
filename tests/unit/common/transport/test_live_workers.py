"""Whether somebody consumes, by what Redis knows of workers and connections."""

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from batchery.transport.live_workers import (
    MAX_IDLE_S,
    LiveWorkers,
    RegisteredWorker,
    list_queues,
    read_held,
)
from batchery.transport.redis_schema import REPLIES_CLIENT

PLAIN = "id=1 addr=h:1 name={name} db={db} idle={idle} cmd={cmd} user=default"


class Client:
    """Redis: lists connections, and counts what workers without leases hold."""

    def __init__(self, *lines: str, held: int = 0) -> None:
        self.connection_pool = SimpleNamespace(connection_kwargs={"db": 2})
        self.lines, self.held = lines, held
        self.is_allowed = True

    def execute_command(self, *_: str) -> bytes:
        if not self.is_allowed:
            raise redis.ResponseError("NOPERM")
        return "\n".join(self.lines).encode()

    def zcard(self, key: str) -> int:
        assert key == "shop-unacked_index"
        return self.held


def line(*, name: str = "", db: int = 2, idle: int = 1, cmd: str = "brpop") -> str:
    return PLAIN.format(name=name, db=db, idle=idle, cmd=cmd)


def may_be(*lines: str, held: int = 0) -> bool:
    return LiveWorkers(Client(*lines, held=held), "shop-").may_be_others()


def test_connection_that_waits_for_messages_may_be_a_worker() -> None:
    assert may_be(line())
    assert may_be(line(cmd="get"), line(cmd="blmove"))


@pytest.mark.parametrize(
    "other", [{"cmd": "get"}, {"db": 1}, {"name": REPLIES_CLIENT}, {"cmd": "brpopx"}]
)
def test_connection_that_does_something_else_is_no_worker(other: dict[str, Any]) -> None:
    assert not may_be(line(**other), held=5)
    assert not may_be()


def test_connection_that_waited_long_ago_is_a_worker_if_messages_are_held() -> None:
    old = line(idle=MAX_IDLE_S)
    assert not may_be(old)
    assert may_be(old, held=1)
    assert may_be(line(idle=MAX_IDLE_S - 1))
    assert may_be(old, line(idle=0))


def test_user_who_may_not_see_connections_must_expect_workers() -> None:
    client = Client()
    client.is_allowed = False
    assert LiveWorkers(client, "shop-").may_be_others()


def test_queues_of_a_worker_are_known_if_it_says_so() -> None:
    assert list_queues(b'{"queues": ["a", "b"]}') == {"a", "b"}
    assert [list_queues(each) for each in (b"{}", b"{", b'{"queues": 1}', None)] == [None] * 4


def test_registered_workers_are_read_with_what_they_say_of_themselves() -> None:
    class Pipe:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            """Is left."""

        def zrange(self, *_: Any, **__: Any) -> None:
            """Is answered by `execute`."""

        hgetall = time = zrange

        def execute(self) -> Any:
            about = (
                b'{"expiry_s": 2.5, "queues": ["q"], "name": "n", "host": "h", "version": "1",'
                b' "leased": {"q": 3}}'
            )
            return [(b"w1", 7.0), (b"w2", 8.0)], {b"w1": about}, (2, 507_000)

    client: Any = Client()
    client.pipeline = lambda **_: Pipe()
    first, second = LiveWorkers(client, "shop-").registered().items()
    assert (first[0], first[1].heartbeat, first[1].expiry_s) == ("w1", 7, 2.5)
    assert first[1].queues == {"q"}
    assert (first[1].name, first[1].host, first[1].version) == ("n", "h", "1")
    assert (first[1].leased, first[1].scheduled) == ({"q": 3}, 0)
    assert (first[1].silent_s, first[1].is_dead) == (2.5, True)
    assert (second[0], second[1].expiry_s, second[1].queues) == ("w2", None, None)
    assert (second[1].name, second[1].host, second[1].version) == (None, None, None)
    assert (second[1].leased, second[1].scheduled) == ({}, 0)
    assert not second[1].is_dead


def test_worker_is_dead_once_it_was_silent_for_as_long_as_its_leases_live() -> None:
    def is_dead(expiry_s: float | None, silent_s: float) -> bool:
        return RegisteredWorker(1, expiry_s, None, silent_s=silent_s).is_dead

    assert [is_dead(8.0, silent_s) for silent_s in (0.0, 7.9, 8.0, 9.0)] == [
        False,
        False,
        True,
        True,
    ]
    # Of one that does not say, its own default holds.
    assert [is_dead(None, silent_s) for silent_s in (4.9, 5.0)] == [False, True]
    # Its clock may be behind that of the Redis before.
    assert not is_dead(5.0, -3.0)


@pytest.mark.parametrize("about", [b"{", b"[]", b'{"leased": 3}', b'{"leased": {"q": "x"}}'])
def test_worker_that_says_nonsense_holds_nothing(about: bytes) -> None:
    assert read_held(about) == ({}, 0)


def test_broker_that_is_no_redis_has_no_workers_to_read() -> None:
    assert LiveWorkers.of(SimpleNamespace(transport=object()), 1.0) is None
