"""The partial results of one job, as its caller reads them: with `for`, or with `async for`."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from batchery.errors import NoResult
from batchery_producer.piece_reader import Event, FollowedJob, PieceReader

#: Why no piece comes, where nobody knows the queue.
ASK = "see `batchery stats`"


class PieceStream(FollowedJob):
    """Yields the partial results of a job, as it yields them; used by one thread at a time.

    `with` closes it at the end of the block.
    """

    def __init__(self, reader: PieceReader | None, task_id: str, **options: Any) -> None:
        """As `FollowedJob` has it."""
        super().__init__(reader, task_id, **options)
        self._arrived = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next partial result.

        Raises:
            NoResult: None came within `timeout_s`, so the job is revoked; or some were dropped.
            GaveUp: None came, as Redis does not answer.
            Exception: Why the job failed, after its last piece.
        """
        if self.is_over:
            raise StopIteration
        with self._arrived:
            came = self._arrived.wait_for(lambda: self._events, self._timeout_s)
        if not came:
            self._check_redis()
            why = self._explain() if self._explain else ASK
            self.close()
            raise NoResult(f"{self._silence}: {why}")
        piece = self._take()
        if piece is None:
            raise StopIteration
        return piece.value

    def give(self, events: Sequence[Event]) -> None:
        """As `FollowedJob.give`."""
        with self._arrived:
            super().give(events)
            self._arrived.notify_all()


class AsyncPieceStream(FollowedJob):
    """Yields the partial results of a job to `async for`, in one event loop.

    `async with` closes it at the end of the block.
    """

    def __init__(self, reader: PieceReader | None, task_id: str, **options: Any) -> None:
        """As `FollowedJob` has it, in the event loop that reads."""
        super().__init__(reader, task_id, **options)
        self.loop = asyncio.get_running_loop()
        #: What `__anext__` waits for.
        self._arrived: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next partial result.

        Raises:
            NoResult: None came within `timeout_s`, so the job is revoked; or some were dropped.
            GaveUp: None came, as Redis does not answer.
            Exception: Why the job could not be sent; or why it failed, after its last piece.
        """
        if self.is_over:
            raise StopAsyncIteration
        if not self._events:
            await self._wait()
            if self.is_over:
                raise StopAsyncIteration  # Somebody has closed it meanwhile.
            if not self._events:
                self._check_redis()
                why = await self._explain() if self._explain else ASK
                self.close()
                raise NoResult(f"{self._silence}: {why}")
        piece = self._take()
        if piece is None:
            raise StopAsyncIteration
        return piece.value

    async def _wait(self) -> None:
        """Waits until something has come, the stream is closed, or `timeout_s` is over."""
        if self._arrived is not None:
            raise RuntimeError(f"job {self.id}: its stream is read by another task already")
        self._arrived = asyncio.get_running_loop().create_future()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._arrived
        finally:
            self._arrived = None

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def give(self, events: Sequence[Event]) -> None:
        """As `FollowedJob.give`, in the event loop that reads."""
        super().give(events)
        self._wake()

    def close(self) -> None:
        """Reads no further, and cancels the job if it has not ended; not one that is followed."""
        super().close()
        self._wake()
