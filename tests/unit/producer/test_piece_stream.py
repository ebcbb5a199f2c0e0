"""How long `async for` waits for a piece: one timer of the stream looks at it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import ref

import pytest

from batchery import NoResult
from batchery_producer.answers import Answer
from batchery_producer.piece_reader import StreamPiece
from batchery_producer.piece_stream import AsyncPieceStream, PieceStream

T = TypeVar("T")


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is the test's: it passes as soon as nothing else is left to do."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(work)


def piece(number: int) -> StreamPiece:
    return StreamPiece(f"{number}-0", number)


def test_each_piece_has_the_time_for_itself() -> None:
    async def read() -> float:
        loop = asyncio.get_running_loop()
        stream = AsyncPieceStream(None, "job", timeout_s=10)
        for number in range(1, 6):
            loop.call_later(9 * number, stream.give, [piece(number)])
        assert [await anext(stream) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert loop.time() == 45
        with pytest.raises(NoResult, match="nothing within 10 s"):
            await anext(stream)
        return loop.time()

    assert run(read()) == 55


def test_time_in_which_nobody_waits_does_not_count() -> None:
    async def read() -> float:
        loop = asyncio.get_running_loop()
        stream = AsyncPieceStream(None, "job", timeout_s=10)
        loop.call_later(1, stream.give, [piece(1)])
        assert await anext(stream) == 1
        await asyncio.sleep(100)
        loop.call_later(9, stream.give, [piece(2)])
        assert await anext(stream) == 2
        return loop.time()

    assert run(read()) == 110


def test_a_stream_that_is_dropped_goes_before_its_time() -> None:
    async def read() -> None:
        stream = AsyncPieceStream(None, "job", timeout_s=1000)
        asyncio.get_running_loop().call_later(1, stream.give, [piece(1)])
        assert await anext(stream) == 1
        left = ref(stream)
        del stream
        assert left() is None

    run(read())


def test_a_job_that_fails_raises_in_the_loop_after_its_pieces() -> None:
    failed = Answer(error=("ValueError", "odd"), stored=ValueError("odd"))

    async def read() -> list[int]:
        stream = AsyncPieceStream(None, "job")
        stream.give([piece(1), failed])
        heard = [await anext(stream)]
        with pytest.raises(ValueError, match="odd"):
            await anext(stream)
        with pytest.raises(ValueError, match="odd"):
            _ = stream.result
        return heard

    assert run(read()) == [1]
    plain = PieceStream(None, "job")
    plain.give([failed])
    with pytest.raises(ValueError, match="odd"):
        next(plain)


def test_a_second_task_that_reads_is_refused_and_the_first_goes_on() -> None:
    async def read() -> list[int]:
        stream = AsyncPieceStream(None, "job", timeout_s=10)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="job job: its stream is read by another task"):
            await anext(stream)
        stream.give([piece(1), piece(2)])
        return [await first, await anext(stream)]

    assert run(read()) == [1, 2]
