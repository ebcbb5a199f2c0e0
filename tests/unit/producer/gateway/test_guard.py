"""The memory for bodies and unread answers, and who is refused where it is full."""

import pytest

from batchery_producer.gateway import guard
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.guard import Buffer


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
    buffer.keep(first, -1)
    assert buffer.keep(second, 300)
    assert not buffer.keep(second, 1)
    buffer.keep(second, -1)
    assert buffer.keep(third, 150)
    # It goes back to whom it belonged to.
    buffer.keep(first, -600)
    assert buffer.keep(third, 300)
    assert (first.kept_bytes, second.kept_bytes, third.kept_bytes) == (0, 300, 450)


def test_a_little_is_there_for_everybody() -> None:
    buffer = Buffer(100)
    assert not buffer.keep(caller(), 200)
    newcomer = caller("two")
    assert buffer.keep(newcomer, 10)
    assert not buffer.keep(newcomer, 1)
