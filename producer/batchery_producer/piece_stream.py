"""The partial results of one job, as its caller reads them: with `for`, or with `async for`."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Self, cast
from weakref import ref

from batchery.errors import GaveUp, NoResult
from batchery_producer.answers import Answer, build_exception
from batchery_producer.piece_reader import Event, PieceReader, StreamPiece, check_after

#: Why no piece comes, where nobody knows the queue.
ASK = "see `batchery stats`"


class FollowedJob:
    """What both kinds of streams have in common.

    Attributes:
        id: Id of the job.
        last_id: Id of the last piece that was read, for `follow`; None before the first one.
        is_over: Whether nothing more will be read.
    """

    def __init__(
        self,
        reader: PieceReader | None,
        task_id: str,
        *,
        after: str | None = None,
        timeout_s: float | None = None,
        keep_s: int | None = None,
        cancel: Callable[[], None] | None = None,
        explain: Callable[[], Any] | None = None,
    ) -> None:
        """Follows nothing yet.

        Args:
            reader: Reads the stream; None for a job that has ended already.
            task_id: Id of the job.
            after: Id of the last piece that is known already.
            timeout_s: How long to wait for each piece, in seconds; None for ever.
            keep_s: How long pieces are of use once the job has ended; None for as long as usual.
            cancel: Ends the job, as nobody wants it; None if that is not ours to say.
            explain: Says why none comes, in an event loop when it is awaited; None if nobody knows.

        Raises:
            BatchArgumentError: `after` is no id of a piece.
        """
        self.id = task_id
        #: Of `Following`.
        self.key = b""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.fetched = check_after(after)
        self.saw_end = self.is_known = False
        self.last_id = after
        self.keep_s = keep_s
        self._reader = reader
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._explain = explain
        self._events: deque[Event] = deque()
        self._answer: Answer | None = None
        self.is_over = False

    @property
    def backlog(self) -> int:
        """Number of pieces that have come and were not read yet."""
        return len(self._events)

    @property
    def has_ended(self) -> bool:
        """Whether its pieces are read to the end, so that there is a `result` or an error."""
        return self._answer is not None

    @property
    def result(self) -> Any:
        """The result of the job, once its pieces are read to the end.

        Raises:
            NoResult: They are not.
            Exception: Why the job failed.
        """
        if self._answer is None:
            raise NoResult(f"job {self.id}: its stream was not read to the end; read on")
        if self._answer.error is not None:
            raise build_exception(self._answer, self._reader and self._reader.backend)
        return self._answer.value

    def leave(self) -> None:
        """Reads no further; the job goes on if somebody follows it within the grace time."""
        self.is_over = True
        if self._reader is not None:
            self._reader.drop([cast(Any, self)])

    def close(self) -> None:
        """Reads no further, and cancels the job if it has not ended; not one that is followed."""
        if self.is_over:
            return
        self.leave()
        if self._cancel is not None:
            self._cancel()

    def _take(self) -> StreamPiece | None:
        """The next piece that has come; None at the end.

        Raises:
            Exception: Why no more pieces come: the job's error, if it failed.
        """
        event = self._events.popleft()
        if isinstance(event, StreamPiece):
            self.last_id = event.id
            return event
        self.is_over = True
        if isinstance(event, Exception):
            raise event
        self._answer = event
        if event.error is not None:
            _ = self.result  # It raises the error.
        return None

    @property
    def _silence(self) -> str:
        return f"job {self.id}: nothing within {self._timeout_s:g} s"

    def _check_redis(self) -> None:
        """Reads no further if Redis is away: to revoke the job would take until it answers.

        Raises:
            GaveUp: It is.
        """
        if self._reader is not None and self._reader.retries.is_away:
            self.leave()
            text = f"{self._silence}, as Redis does not answer; this program's log says why"
            raise GaveUp(text)


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
        """As `Following.give`."""
        with self._arrived:
            self._events.extend(events)
            self._arrived.notify_all()


class AsyncPieceStream(FollowedJob):
    """Yields the partial results of a job to `async for`, in one event loop.

    `async with` closes it at the end of the block.
    """

    def __init__(self, reader: PieceReader | None, task_id: str, **options: Any) -> None:
        """As `FollowedJob` has it, in the event loop that reads."""
        super().__init__(reader, task_id, **options)
        self.loop = asyncio.get_running_loop()
        #: What `__anext__` waits for. With asyncio's own `Event` and `timeout` a piece costs three
        #: times as much.
        self._arrived: asyncio.Future[None] | None = None
        #: When that takes too long, on the loop's clock; and whether a timer will look at it. One
        #: timer for each piece would cost as much as all else.
        self._due_s = inf
        self._is_timed = False

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
        loop = asyncio.get_running_loop()
        self._arrived = loop.create_future()
        if self._timeout_s is not None:
            self._due_s = loop.time() + self._timeout_s
            if not self._is_timed:
                self._is_timed = True
                loop.call_at(self._due_s, _look_at_time, ref(self), loop)
        try:
            await self._arrived
        finally:
            self._arrived = None

    def look_at_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wakes who has waited for too long; for the timer."""
        self._is_timed = self._arrived is not None and loop.time() < self._due_s
        if self._is_timed:
            loop.call_at(self._due_s, _look_at_time, ref(self), loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def give(self, events: Sequence[Event]) -> None:
        """As `Following.give`, in the event loop that reads."""
        self._events.extend(events)
        self._wake()

    def close(self) -> None:
        """Reads no further, and cancels the job if it has not ended; not one that is followed."""
        super().close()
        self._wake()


def _look_at_time(stream: "ref[AsyncPieceStream]", loop: asyncio.AbstractEventLoop) -> None:
    """A stream that its user has dropped goes before its time."""
    if (left := stream()) is not None:
        left.look_at_time(loop)
