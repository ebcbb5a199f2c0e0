"""The memory for bodies and unread answers, and who is refused where it is full."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batchery.settings import Settings
from batchery_producer.gateway import guard
from batchery_producer.gateway.callers import Caller, Callers
from batchery_producer.gateway.connection import EXTENSION
from batchery_producer.gateway.guard import Buffer, Guard


def caller(name: str = "one") -> Caller:
    return Caller(name, None, None, 100, 100, 100)


@pytest.fixture(autouse=True)
def no_share_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of a few bytes count."""
    monkeypatch.setattr(guard, "MIN_SHARE_BYTES", 10)


def test_a_caller_alone_has_half_and_who_comes_finds_room() -> None:
    buffer, first, second, third = Buffer(1200), caller(), caller("two"), caller("three")
    assert buffer.keep(first, 600)
    assert not buffer.keep(first, 1)
    buffer.release(first, 1)
    assert buffer.keep(second, 300)
    assert not buffer.keep(second, 1)
    buffer.release(second, 1)
    assert buffer.keep(third, 150)
    # It goes back to whom it belonged to.
    buffer.release(first, 600)
    assert buffer.keep(third, 300)
    assert (first.kept_bytes, second.kept_bytes, third.kept_bytes) == (0, 300, 450)


def test_a_little_is_there_for_everybody() -> None:
    buffer = Buffer(100)
    assert not buffer.keep(caller(), 200)
    newcomer = caller("two")
    assert buffer.keep(newcomer, 10)
    assert not buffer.keep(newcomer, 1)


class UnreadConnection:
    """A connection whose caller reads nothing of an answer."""

    is_ending = False

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.aborted = False
        self.read: Callable[[], object] = lambda: None

    def when_flushed(self, function: Callable[[], object]) -> None:
        self.read = function

    def abort(self) -> None:
        self.aborted = True


def test_unread_answers_beyond_the_share_of_a_caller_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_BUFFERED_BYTES", 1000)
    settings = Settings()
    callers = Callers(settings)
    anyone = callers.identify_caller({})

    async def app(*_: object) -> None:
        return

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: object) -> None:
        return

    guarded = Guard(app, callers=callers, settings=settings.gateway)

    def ask(unsent_bytes: int) -> UnreadConnection:
        connection: Any = UnreadConnection(unsent_bytes)
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/x", "headers": []}
        scope["extensions"] = {EXTENSION: connection}
        asyncio.run(guarded(scope, receive, send))
        unread: UnreadConnection = connection
        return unread

    # One answer, however large.
    first = ask(700)
    assert not first.aborted
    assert (anyone.in_flight, anyone.kept_bytes) == (1, 700)
    first.read()
    assert (anyone.in_flight, anyone.kept_bytes) == (0, 0)
    some = [ask(200), ask(200), ask(200)]
    assert [each.aborted for each in some] == [False, False, True]
    for each in some:
        each.read()
    assert (anyone.in_flight, anyone.kept_bytes) == (0, 0)
