"""How answers are written: long work in threads, one for each caller at a time; streams."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from batchery_producer.gateway import answers
from batchery_producer.gateway.answers import EventStream, json_of_arguments, off_loop
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem


def caller(name: str) -> Caller:
    """A caller with some limits."""
    return Caller(name, None, None, 100, 100, 100)


def test_many_long_requests_of_one_caller_hold_up_nobody_else() -> None:
    asyncio.run(_many_long_requests())


async def _many_long_requests() -> None:
    may_end, one, other = threading.Event(), caller("one"), caller("other")
    held = [asyncio.ensure_future(off_loop(one, may_end.wait, is_long=True)) for _ in range(20)]
    try:
        assert await off_loop(other, lambda: "done", is_long=True) == "done"
        assert await asyncio.to_thread(lambda: "done") == "done"
        assert await off_loop(one, lambda: "short", is_long=False) == "short"
        assert not any(each.done() for each in held)
    finally:
        may_end.set()
    assert await asyncio.gather(*held) == [True] * 20


def test_long_work_that_nobody_waits_for_is_not_begun() -> None:
    asyncio.run(_work_that_is_cancelled())


async def _work_that_is_cancelled() -> None:
    may_end, one, begun = threading.Event(), caller("one"), threading.Event()
    first = asyncio.ensure_future(off_loop(one, may_end.wait, is_long=True))
    late = asyncio.ensure_future(off_loop(one, begun.set, is_long=True))
    await asyncio.sleep(0)
    late.cancel()
    may_end.set()
    assert await first
    await off_loop(one, lambda: None, is_long=True)
    assert not begun.is_set()


@pytest.mark.parametrize("value", [2**64, [-(2**63) - 1], {"a": {1, 2}}, "\ud800"])
def test_arguments_that_workers_cannot_read_are_refused(value: object) -> None:
    with pytest.raises(Problem, match="cannot be sent") as caught:
        json_of_arguments(value)
    assert caught.value.kind is Kind.INVALID
    assert json_of_arguments({"b": [1], "a": 2**64 - 1}) == b'{"a":18446744073709551615,"b":[1]}'


def sent(stream: EventStream) -> list[bytes]:
    """The bodies that a stream sends."""
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))

    asyncio.run(stream.stream_response(send))
    return [body for body in bodies if body]


def test_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_S", 0.01)
    stopped: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(0.05)
        yield b"last"

    bodies = sent(EventStream(events(), lambda: stopped.append(True)))
    assert (bodies[0], bodies[-1]) == (b"first", b"last")
    assert set(bodies[1:-1]) == {b": ping\n"}
    assert stopped == [True]
