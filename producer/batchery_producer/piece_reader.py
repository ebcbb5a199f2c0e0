"""Reads the piece streams of many jobs with one connection and one command at a time.

A thread waits for the next pieces of all of them, and hands them to whoever reads. A stream that is
added while it waits wakes it, by an entry of a stream that it reads as well. The end of a job is an
entry, too; where none comes, as from workers that are not Batchery's, looking for the result now
and then finds it.
"""

import asyncio
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakSet

import redis
from celery import Celery, uuid
from celery.backends.redis import RedisBackend

from batchery.errors import BatchArgumentError, NoResult, SettingsError, UnknownJob
from batchery.protocol.headers import backend_prefix
from batchery.protocol.pieces import (
    END,
    FIRST_ID,
    NOTHING_READ,
    PIECE,
    READER_S,
    RENEW_S,
    pieces_key,
    reader_key,
)
from batchery.retry import REFUSALS, Interrupted, RetryPolicy
from batchery.transport.inbox import read_json
from batchery_producer.answers import Answer
from batchery_producer.collector import read_stored

#: How long one command waits for pieces, in seconds.
BLOCK_S = 1.0

#: How long it waits while a stream is full, in seconds: its reader goes on meanwhile.
FULL_BLOCK_S = 0.02

#: How often results are looked for whose streams do not say that they are there, in seconds.
LOOK_S = 0.5

#: Maximum number of pieces that one command fetches of each stream.
COUNT = 1000

#: So many pieces wait for a reader; the others wait in Redis.
MAX_BACKLOG = 2000

#: How long the stream that wakes the thread is kept, in seconds.
WAKE_S = 60

#: In the place of what is stored of a job, for one that was not looked for.
NOT_LOOKED = b""

#: What is said of a job that nothing is known of.
UNKNOWN = (
    "job {}: there is no stream of it, and no result; it was not sent by `stream` to this Redis, or"
    " ended so long ago that both have expired"
)

#: What `after` may be: the id of a piece.
PIECE_ID = re.compile(r"\d{1,15}-0")


class StreamPiece(NamedTuple):
    """One partial result."""

    id: str
    value: Any


#: What comes of a stream: pieces, then how its job ended, or why nothing more comes.
Event = StreamPiece | Answer | Exception


class Following(Protocol):
    """Who reads the stream of a job."""

    id: str
    #: Key of the stream; its reader sets it.
    key: bytes
    #: Where `give` must be called; None for any thread.
    loop: asyncio.AbstractEventLoop | None
    #: Id of the last entry that was fetched for it.
    fetched: str
    #: Whether the stream says that the result is stored.
    saw_end: bool
    #: Whether its job has been sent, for sure.
    is_known: bool

    @property
    def backlog(self) -> int:
        """Number of events that were not taken yet."""

    def give(self, events: Sequence[Event]) -> None:
        """Takes events."""


class PieceReader:
    """The piece streams of all jobs of one app that somebody in this process reads.

    Its thread lives as long as there are any. A stream that its user has dropped goes by itself.
    """

    def __init__(self, app: Celery, stop: Callable[[], bool] = lambda: False) -> None:
        """Does not connect yet.

        Args:
            app: The app whose jobs are read.
            stop: Asked while Redis is away; True ends the attempts.

        Raises:
            SettingsError: The app's result backend is no Redis.
        """
        if not isinstance(app.backend, RedisBackend):
            raise SettingsError(
                f"app {app.main!r}: partial results are read from Redis, and its result backend is"
                f" {type(app.backend).__name__}; set result_backend to a Redis URL"
            )
        self.backend = backend = cast(Any, app.backend)
        self._closed = False
        self._stop = stop
        self.retries = self._new_retries()
        self._errors = (*backend.connection_errors, *REFUSALS)
        self._client: Any = backend._create_client(**backend.connparams)
        # What redis-py makes of entries takes as long as all else that is done with them here.
        self._client.set_response_callback("XREAD", lambda answer, **_: answer)
        timeout_s = backend.connparams.get("socket_timeout")
        self._block_ms = int(min(BLOCK_S, timeout_s / 2 if timeout_s else BLOCK_S) * 1000)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._streams: WeakSet[Following] = WeakSet()
        self._look_at_s = self._renew_at_s = 0.0
        self._wake_key = backend_prefix(backend) + b"batchery-wake:" + uuid().encode()
        self._woken = NOTHING_READ
        #: See `gives_all_streams`; None before the first command.
        self._gives_all: bool | None = None

    def open(self, streams: Sequence[Following]) -> None:
        """Makes the streams of jobs that are about to be sent, and follows them.

        Raises:
            GaveUp: Redis stays away.
        """
        kept_s = int(self.backend.expires or READER_S * 24)
        for stream in streams:
            stream.is_known = True
        self._add(streams)

        def make() -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for stream in streams:
                    # Made once, however often this is tried.
                    pipe.delete(stream.key)
                    pipe.xadd(stream.key, {b"begin": b""}, id=FIRST_ID)
                    pipe.expire(stream.key, kept_s)
                    pipe.set(reader_key(self.backend, stream.id), b"", ex=READER_S)
                self._add_wake(pipe)
                pipe.execute()

        self.retries.call(make, self._errors)

    def follow(self, stream: Following) -> None:
        """Follows the stream of a job that was sent before; at once after `wake`."""
        self._add([stream])

    def wake(self) -> None:
        """Has the thread look at once for streams that were added; it will do so in a moment."""
        with suppress(*self._errors), self._client.pipeline(transaction=False) as pipe:
            self._add_wake(pipe)
            pipe.execute()

    def drop(self, streams: Iterable[Following]) -> None:
        """Follows these streams no longer."""
        with self._lock:
            self._streams.difference_update(streams)

    def give_up(self, task_ids: Collection[str]) -> None:
        """Says that nobody wants these jobs any more.

        Raises:
            GaveUp: Redis stays away.
        """
        keys = [reader_key(self.backend, task_id) for task_id in task_ids]
        self.retries.call(partial(self._client.unlink, *keys), self._errors)

    def close(self) -> None:
        """Ends the thread; streams that are still read end with an error."""
        self._closed = True
        self._give_all(NoResult("the client was closed, and read no further"))
        if (thread := self._thread) is not None and thread.is_alive():
            self.wake()
            thread.join(BLOCK_S)
        self._client.connection_pool.disconnect()

    def _new_retries(self) -> RetryPolicy:
        return RetryPolicy(lambda: self._closed or self._stop())

    def _add(self, streams: Sequence[Following]) -> None:
        for stream in streams:
            stream.key = pieces_key(self.backend, stream.id)
        with self._lock:
            self._streams.update(streams)
            # After a fork the thread is another process's.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="batchery-reader", daemon=True
                )
                self._thread.start()

    def _add_wake(self, pipe: Any) -> None:
        pipe.xadd(self._wake_key, {b"": b""}, maxlen=1, approximate=False)
        pipe.expire(self._wake_key, WAKE_S)

    def _give_all(self, event: Event) -> None:
        with self._lock:
            streams = list(self._streams)
            self._streams.clear()
        _give((stream, [event]) for stream in streams)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._streams or self._closed:
                    self._thread = None
                    return
            try:
                self._read_some()
            except Interrupted:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is, those who read must know
                self._give_all(error)
                self.retries = self._new_retries()

    def _read_some(self) -> None:
        """Waits for pieces, and hands them on."""
        now_s = time.monotonic()
        # Nothing here may hold a stream while this waits: those that were dropped must go.
        question = after, unknown, looked, _, _ = self._plan(now_s)
        answer = self.retries.call(partial(self._ask, *question), self._errors)
        *_, found = answer
        stored = dict(zip(looked, answer[-2], strict=True)) if looked else {}
        exist = dict(zip(unknown, answer, strict=False))
        # A mapping in RESP3, pairs in RESP2.
        entries = dict(found or ())
        for id_, _ in entries.pop(self._wake_key, ()):
            self._woken = id_.decode()
        with self._lock:
            streams = list(self._streams)
        came: list[tuple[Following, Sequence[Event]]] = []
        for stream in streams:
            if not stream.is_known and stream.id in exist:
                # Whoever sends a job makes its stream first.
                stream.is_known = bool(exist[stream.id]) or stored[stream.id] is not None
                if not stream.is_known:
                    self.drop([stream])
                    came.append((stream, [UnknownJob(UNKNOWN.format(stream.id))]))
                    continue
            own = entries.get(stream.key, ())
            is_looked = stream.id in stored and len(own) < COUNT
            # One that was added meanwhile may lack what came before this.
            if (own or is_looked) and not is_beyond(after.get(stream.key), stream.fetched):
                looked_up = stored[stream.id] if is_looked else NOT_LOOKED
                came.append((stream, self._take_in(stream, own, looked_up)))
        _give(came)

    def _plan(
        self, now_s: float
    ) -> tuple[dict[bytes, str], list[str], list[str], list[str], int | None]:
        """What to ask, and how long to wait for it.

        Returns:
            What to read, by key; jobs that may not exist; those to look for; those to renew; how
            long to wait.
        """
        with self._lock:
            streams = list(self._streams)
        after: dict[bytes, str] = {}
        for stream in streams:
            # Of two that follow one job, the one that has less of it.
            if stream.backlog < MAX_BACKLOG and (
                stream.key not in after or is_beyond(after[stream.key], stream.fetched)
            ):
                after[stream.key] = stream.fetched
        if is_due := now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
        unknown = list(dict.fromkeys(each.id for each in streams if not each.is_known))
        looked = [each.id for each in streams if is_due or each.saw_end or not each.is_known]
        block_ms = self._block_ms
        if len(after) < len(streams):
            block_ms = int(FULL_BLOCK_S * 1000)
        renewed = []
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + RENEW_S
            renewed = [each.id for each in streams]
        return after, unknown, list(dict.fromkeys(looked)), renewed, None if looked else block_ms

    def _ask(
        self,
        after: Mapping[bytes, str],
        unknown: Sequence[str],
        looked: Sequence[str],
        renewed: Sequence[str],
        block_ms: int | None,
    ) -> list[Any]:
        """Sends all that in one round trip; safe to repeat."""
        if self._gives_all is None:
            self._gives_all = gives_all_streams(self._client)
        with self._client.pipeline(transaction=False) as pipe:
            for task_id in unknown:
                pipe.exists(pieces_key(self.backend, task_id))
            for task_id in renewed:
                # It brings no key back that somebody has removed.
                pipe.expire(reader_key(self.backend, task_id), READER_S)
            if looked:
                pipe.mget([self.backend.get_key_for_task(task_id) for task_id in looked])
            # Results are looked for first: what was sent before them is read by now.
            streams = {**after, self._wake_key: self._woken}
            pipe.xread(streams, count=COUNT, block=block_ms)
            if block_ms is not None and not self._gives_all:
                # Both are answered together, and what the first one has is in the second, too.
                pipe.xread(streams, count=COUNT)
            answers: list[Any] = pipe.execute()
        return answers

    def _take_in(self, stream: Following, entries: Any, stored: bytes | None) -> Sequence[Event]:
        """The events that have come of a stream.

        Args:
            stream: The stream.
            entries: The entries.
            stored: What is stored of its job, None for nothing, or `NOT_LOOKED`.
        """
        # The task of a job that has ended and left nothing ignores its results.
        is_over = stream.saw_end and stored is None
        try:
            events: list[Event] = list(_new_pieces(stream, entries))
            answer = Answer() if is_over else read_stored(self.backend, stored) if stored else None
            if answer is not None:
                events.append(answer)
        except Exception as error:  # noqa: BLE001 - a stream may hold anything
            events = [error]
        if events and not isinstance(events[-1], StreamPiece):
            self.drop([stream])
        return events


def reader_for(app: Celery) -> PieceReader:
    """The reader of an app's own tasks in this process.

    Raises:
        SettingsError: The app's result backend is no Redis.
    """
    found: PieceReader | None = vars(app).get("_batchery_reader")
    if found is None:
        found = vars(app).setdefault("_batchery_reader", PieceReader(app))
    return found


def gives_all_streams(client: Any) -> bool:
    """Whether XREAD gives what all streams have after it has waited, and not the first one alone.

    Redis does so since 7.2.

    Raises:
        RedisError: As for any command.
    """
    with suppress(redis.ResponseError, LookupError, TypeError, ValueError):
        answer = client.execute_command("HELLO")
        # A mapping in RESP3.
        told = (
            answer
            if isinstance(answer, dict)
            else dict(zip(answer[::2], answer[1::2], strict=True))
        )
        major, minor, *_ = map(int, told[b"version"].split(b"."))
        return (major, minor) >= (7, 2)
    return False  # It may be another server, or hide behind a proxy.


def check_after(after: str | None) -> str:
    """The id after which a stream is to be read.

    Raises:
        BatchArgumentError: It is no id of a piece.
    """
    if after is None:
        return NOTHING_READ
    if not isinstance(after, str) or not PIECE_ID.fullmatch(after):
        raise BatchArgumentError(
            f"after = {after!r:.80}: expected the id of a piece, as `last_id` gives it, such as"
            " '17-0'"
        )
    return after


def is_beyond(one: str | None, other: str) -> bool:
    """Whether the id of a stream's entry comes after another one; no id is beyond all."""
    if one is None or one == other:
        return one is None
    return entry_order(one) > entry_order(other)


@lru_cache(COUNT)
def entry_order(entry_id: str) -> tuple[int, int]:
    """Orders the ids of a stream's entries."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second)


def _give(came: Iterable[tuple[Following, Sequence[Event]]]) -> None:
    """Hands events on; an event loop is woken once for all of its streams, as waking it is slow."""
    by_loop = defaultdict[asyncio.AbstractEventLoop | None, list[Any]](list)
    for stream, events in came:
        by_loop[stream.loop].append((stream, events))
    for loop, given in by_loop.items():
        if loop is None:
            _give_here(given)
        else:
            with suppress(RuntimeError):  # The event loop is closed, so nobody reads.
                loop.call_soon_threadsafe(_give_here, given)


def _give_here(given: Iterable[tuple[Following, Sequence[Event]]]) -> None:
    for stream, events in given:
        if events:
            stream.give(events)


def _new_pieces(stream: Following, entries: Iterable[Any]) -> Iterator[StreamPiece]:
    """The pieces that a reader does not have yet.

    Raises:
        NoResult: Redis does not have them any more.
    """
    last = entry_order(stream.fetched)
    for raw_id, (field, value, *_) in entries:
        id_ = raw_id.decode()
        order = entry_order(id_)
        if order <= last:
            continue  # Somebody else who reads this stream has less of it.
        stream.saw_end = stream.saw_end or field == END
        (number, _), (before, _) = order, last
        if field == PIECE and number > before + 1:
            raise NoResult(
                f"job {stream.id}: its pieces {before + 1} to {number - 1} were dropped"
                " before they were read; read faster, or raise stream_max_pieces"
            )
        stream.fetched, last = id_, order
        if field == PIECE:
            yield StreamPiece(id_, read_json(value))
