"""Reads the piece streams of many jobs with one connection and one command at a time.

A thread waits for the next entry of one stream, its wake stream, which says of which jobs that are
read here there is more. Then it reads the streams of those, and hands what has come to whoever
reads. Now and then it reads all of them, as a wake may be lost, and looks for results as well.
"""

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from celery import Celery, uuid

from batchery.cluster_client import send_all, split_keys
from batchery.errors import BatchArgumentError, GaveUp, NoResult, UnknownJob
from batchery.protocol.pieces import (
    END,
    FIRST_ID,
    MAX_WAKES,
    PIECE,
    READER_S,
    RENEW_S,
    WAKE_S,
    WOKEN,
    pieces_key,
    reader_key,
    wake_key,
    woken_key,
)
from batchery.retry import REFUSALS, Interrupted, RetryPolicy
from batchery.transport.codec import read_json
from batchery_producer.answers import Answer, build_exception
from batchery_producer.collector import read_stored, redis_backend

#: How long one command waits for a wake, in seconds. Redis may answer 0.1 s later, and must not be
#: taken for one that hangs: see `RetryPolicy.is_away`.
BLOCK_S = 0.8

#: How long it waits while a reader has much to read, in milliseconds, who goes on meanwhile.
FULL_BLOCK_MS = 20

#: How often pieces and results are looked for of which no wake has told, in seconds.
LOOK_S = 0.5

#: Maximum number of pieces that one command fetches of each stream.
COUNT = 1000

#: So many pieces wait for a reader; the others wait in Redis.
MAX_BACKLOG = 2000

#: In the place of what is stored of a job, for one that was not looked for.
NOT_LOOKED = b""

#: What is said of a job that nothing is known of.
UNKNOWN = (
    "job {}: there is no stream of it, and no result; it was not sent by `stream` to this Redis, or"
    " ended so long ago that both have expired"
)

#: The id of what a reader has who has nothing.
NOTHING_FETCHED = (0, 0)

#: What `after` may be: the id of a piece.
PIECE_ID = re.compile(r"\d{1,15}-0")


class StreamPiece(NamedTuple):
    """One partial result."""

    id: str
    value: Any


#: The id of a stream's entry, both its numbers, in their order.
EntryId = tuple[int, int]

#: The words of a command.
Command = tuple[Any, ...]

#: What comes of a stream: pieces, then how its job ended, or why nothing more comes.
Event = StreamPiece | Answer | Exception


class FollowedJob:
    """A job whose partial results are read; what both kinds of streams have in common.

    Attributes:
        id: Id of the job.
        last_id: Id of the last piece that was read, for `follow`; None before the first one.
        is_over: Whether nothing more will be read.
    """

    #: Where `give` must be called; None for any thread.
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self,
        reader: "PieceReader | None",
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
        self.last_id = after
        self.is_over = False
        self.keep_s = keep_s
        #: Key of the stream; its reader sets it.
        self.key = b""
        #: Id of the last entry that was fetched.
        self.fetched = check_after(after)
        #: Whether the stream says that the result is stored, and whether the job was sent for sure.
        self.saw_end = self.is_known = False
        self._reader = reader
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._explain = explain
        self._events: deque[Event] = deque()
        self._answer: Answer | None = None

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
            self._reader.drop([self])

    def close(self) -> None:
        """Reads no further, and cancels the job if it has not ended; not one that is followed."""
        if self.is_over:
            return
        self.leave()
        if self._cancel is not None:
            self._cancel()

    def give(self, events: Sequence[Event]) -> None:
        """Takes what has come of the job."""
        self._events.extend(events)

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

    def take_entries(self, entries: Iterable[Any]) -> Iterator[StreamPiece]:
        """The pieces among some entries of the stream that were not fetched before.

        Raises:
            NoResult: Redis does not have the next ones any more.
        """
        for raw_id, (field, value, *_) in entries:
            id_ = raw_id.decode()
            order = parse_id(id_)
            if order <= self.fetched:
                continue  # Somebody else who reads this stream has less of it.
            self.saw_end = self.saw_end or field == END
            (number, _), (before, _) = order, self.fetched
            if field == PIECE and number > before + 1:
                raise NoResult(
                    f"job {self.id}: its pieces {before + 1} to {number - 1} were dropped"
                    " before they were read; read faster, or raise stream_max_pieces, unless the"
                    " worker's log says that it could not write them"
                )
            self.fetched = order
            if field == PIECE:
                yield StreamPiece(id_, read_json(value))


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
        self.backend = backend = redis_backend(app)
        self._closed = False
        self._stop = stop
        self.retries = self._new_retries()
        self._errors = (*backend.connection_errors, *REFUSALS)
        self._client: Any = backend._create_client(**backend.connparams)
        timeout_s = backend.connparams.get("socket_timeout")
        self._block_ms = int(min(BLOCK_S, timeout_s / 2 if timeout_s else BLOCK_S) * 1000)
        self._kept_s = int(backend.expires or READER_S * 24)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        #: Who reads each stream, by its key; those that were dropped go by themselves.
        self._streams: dict[bytes, list[ref[FollowedJob]]] = {}
        #: Keys of streams that must be read, as they may have more than was fetched.
        self._behind: set[bytes] = set()
        self._look_at_s = self._renew_at_s = 0.0
        self._wake_key = wake_key(backend, uuid())
        #: Id of the last wake.
        self._woken = "0-0"

    def open(self, streams: Sequence[FollowedJob], timeout_s: float | None = None) -> None:
        """Makes the streams of jobs that are about to be sent, and follows them.

        Args:
            streams: Of these jobs.
            timeout_s: How long their caller waits for anything, in seconds; None for ever.

        Raises:
            GaveUp: Redis stays away for so long, or for two minutes.
        """
        for stream in streams:
            stream.is_known = True
        self._add(streams)

        commands = self._spell_wake()
        for stream in streams:
            # Made once, however often this is tried.
            commands += [
                ("DEL", stream.key),
                ("XADD", stream.key, FIRST_ID, "begin", ""),
                ("EXPIRE", stream.key, self._kept_s),
                ("SET", reader_key(self.backend, stream.id), stream.keep_s or "", "EX", READER_S),
                *self._spell_woken(stream.id),
            ]
        retries = self.retries if timeout_s is None else RetryPolicy.within(timeout_s)
        retries.call(partial(self._send, commands), self._errors)

    def follow(self, stream: FollowedJob) -> None:
        """Follows the stream of a job that was sent before; at once after `wake`."""
        self._add([stream])

    def wake(self) -> None:
        """Has the thread look at once for streams that were added; it will do so in a moment."""
        with suppress(*self._errors):
            self._send(self._spell_wake())

    def drop(self, streams: Iterable[FollowedJob]) -> None:
        """Follows these streams no longer."""
        with self._lock:
            for stream in streams:
                group = self._streams.pop(stream.key, ())
                if left := [each for each in group if each() not in (None, stream)]:
                    self._streams[stream.key] = left

    def give_up(self, task_ids: Collection[str]) -> None:
        """Says that nobody wants these jobs any more.

        Raises:
            GaveUp: Redis stays away.
        """
        keys = [reader_key(self.backend, task_id) for task_id in task_ids]
        self.retries.call(partial(self._client.unlink, *keys), self._errors)

    def forget(self, streams: Iterable[FollowedJob]) -> None:
        """Removes the streams of jobs that were not sent after all."""
        kinds, backend = (pieces_key, reader_key, woken_key), self.backend
        with suppress(Exception):  # They expire.
            self._client.unlink(*(kind(backend, each.id) for each in streams for kind in kinds))

    def close(self) -> None:
        """Ends the thread; streams that are still read end with an error."""
        self._closed = True
        self._give_all(NoResult("the client was closed, and read no further"))
        # A Redis that hangs would answer nothing.
        thread = None if self.retries.is_away else self._thread
        if thread is not None and thread.is_alive():
            self.wake()
            thread.join(BLOCK_S)
        self._client.connection_pool.disconnect()

    def _new_retries(self) -> RetryPolicy:
        return RetryPolicy(lambda: self._closed or self._stop())

    def _add(self, streams: Sequence[FollowedJob]) -> None:
        if self._closed:
            raise NoResult("the client is closed, and reads no streams")
        for stream in streams:
            stream.key = pieces_key(self.backend, stream.id)
        with self._lock:
            for stream in streams:
                self._streams.setdefault(stream.key, []).append(ref(stream))
                self._behind.add(stream.key)
            # After a fork the thread is another process's.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="batchery-reader", daemon=True
                )
                self._thread.start()

    def _spell_wake(self) -> list[Command]:
        """Wakes this reader, and keeps its wake stream."""
        key = self._wake_key
        return [("XADD", key, "MAXLEN", MAX_WAKES, "*", "", ""), ("EXPIRE", key, WAKE_S)]

    def _spell_woken(self, task_id: str) -> list[Command]:
        """Has this reader woken by what comes of a job from now on."""
        key = woken_key(self.backend, task_id)
        return [("SADD", key, self._wake_key), ("EXPIRE", key, self._kept_s)]

    def _send(self, commands: Sequence[Command]) -> list[Any]:
        """Sends commands in one round trip; their answers."""
        return send_all(self._client, commands)

    def _list(self, keys: Iterable[bytes]) -> list[FollowedJob]:
        """Who reads these streams."""
        with self._lock:
            groups = [self._streams.get(key, ()) for key in keys]
        return [stream for group in groups for each in group if (stream := each()) is not None]

    def _give_all(self, event: Event) -> None:
        streams = self._list(list(self._streams))
        with self._lock:
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
        """Reads what there may be more of and hands it on; if nothing, waits for a wake."""
        now_s = time.monotonic()
        commands = self._spell_renewal() if now_s >= self._renew_at_s else []
        if is_due := now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
        streams = self._choose_behind(all_of_them=is_due)
        if not streams:
            # Nothing here may hold a stream while this waits: those that were dropped must go.
            self._await_wake(commands)
            return
        # Of two that follow one job, the one that has less of it. Whether there is a stream at all
        # says its first entry.
        after: dict[bytes, EntryId] = {}
        for stream in streams:
            last = stream.fetched if stream.is_known else NOTHING_FETCHED
            after[stream.key] = min(after.get(stream.key, last), last)
        # Before the stream is read: of what comes then, a wake tells.
        unknown = [each.id for each in streams if not each.is_known]
        commands += [command for each in unknown for command in self._spell_woken(each)]
        # Results are looked for first: what was sent before them is read by now.
        looked = {
            self.backend.get_key_for_task(each.id): each.id
            for each in streams
            if is_due or each.saw_end or not each.is_known
        }
        results, pieces = (split_keys(self._client, keys) for keys in (looked, after))
        commands += [("MGET", *keys) for keys in results]
        for keys in pieces:
            ids = ("{}-{}".format(*after[key]) for key in keys)
            commands.append(("XREAD", "COUNT", COUNT, "STREAMS", *keys, *ids))
        answers = self.retries.call(partial(self._send, commands), self._errors)
        answers = answers[-len(results) - len(pieces) :]
        stored, entries = dict[str, Any](), dict[bytes, Any]()
        for keys, values in zip(results, answers, strict=False):
            stored.update(zip(map(looked.__getitem__, keys), values, strict=True))
        for found in answers[len(results) :]:
            # A mapping in RESP3, pairs in RESP2.
            entries.update(found or ())
        came = [
            (each, self._take_in(each, entries.get(each.key, ()), stored.get(each.id, NOT_LOOKED)))
            for each in streams
        ]
        # Nothing comes after what ends a stream.
        self.drop(each for each, events in came if events and type(events[-1]) is not StreamPiece)
        _give(came)

    def _choose_behind(self, *, all_of_them: bool) -> Sequence[FollowedJob]:
        """The streams to read, but for those whose readers have much to read."""
        with self._lock:
            if all_of_them:
                for key, group in list(self._streams.items()):
                    if all(each() is None for each in group):
                        del self._streams[key]
                self._behind.update(self._streams)
            behind = list(self._behind)
            self._behind.clear()
        streams = self._list(behind)
        full = {each.key for each in streams if each.backlog >= MAX_BACKLOG}
        self._behind |= full
        return [each for each in streams if each.key not in full]

    def _await_wake(self, commands: Sequence[Command]) -> None:
        """Waits until there is more of some streams; sends other commands with that."""
        # The readers of those that are behind have no room yet.
        block_ms = FULL_BLOCK_MS if self._behind else self._block_ms
        wait = ("XREAD", "BLOCK", block_ms, "STREAMS", self._wake_key, self._woken)
        *_, answer = self.retries.call(partial(self._send, [*commands, wait]), self._errors)
        entries = dict(answer or ()).get(self._wake_key, ())
        for id_, fields in entries:
            self._woken = id_.decode()
            woken = dict(zip(fields[::2], fields[1::2], strict=True)).get(WOKEN, b"")
            self._behind.update(woken.split(b"\n"))
        if len(entries) >= MAX_WAKES:
            self._look_at_s = 0.0  # There may have been more.

    def _spell_renewal(self) -> list[Command]:
        """Says that all these jobs are read."""
        self._renew_at_s = time.monotonic() + RENEW_S
        keys = [reader_key(self.backend, each.id) for each in self._list(list(self._streams))]
        # It brings no key back that somebody has removed.
        return [*self._spell_wake(), *(("EXPIRE", key, READER_S) for key in keys)]

    def _take_in(
        self, stream: FollowedJob, entries: Sequence[Any], stored: bytes | None
    ) -> list[Event]:
        """The events that have come of a stream, and of the result of its job.

        Args:
            stream: The stream.
            entries: What was read of it. Whoever sends jobs may write other things there, too.
            stored: What is stored of the job; None if nothing, or `NOT_LOOKED`.
        """
        if not stream.is_known:
            # Whoever sends a job makes its stream first.
            stream.is_known = bool(entries) or stored is not None
            if not stream.is_known:
                return [UnknownJob(UNKNOWN.format(stream.id))]
        has_more = len(entries) >= COUNT
        # The task of a job that has ended and left nothing ignores its results.
        is_over = stream.saw_end and stored is None
        try:
            events: list[Event] = list(stream.take_entries(entries))
            answer = Answer() if is_over else read_stored(self.backend, stored) if stored else None
            if answer is not None and not has_more:
                events.append(answer)
        except Exception as error:  # noqa: BLE001 - a stream may hold anything
            events = [error]
        if has_more or stream.saw_end:
            self._behind.add(stream.key)
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


def check_after(after: str | None) -> EntryId:
    """The id after which a stream is to be read.

    Raises:
        BatchArgumentError: It is no id of a piece.
    """
    if after is None:
        return NOTHING_FETCHED
    if not isinstance(after, str) or not PIECE_ID.fullmatch(after):
        raise BatchArgumentError(
            f"after = {after!r:.80}: expected the id of a piece, as `last_id` gives it, such as"
            " '17-0'"
        )
    return parse_id(after)


def parse_id(entry_id: str) -> EntryId:
    """The numbers of an entry's id."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second)


def _give(came: Iterable[tuple[FollowedJob, Sequence[Event]]]) -> None:
    """Hands events on, each in the event loop of who reads."""
    for stream, events in came:
        if not events:
            continue
        if stream.loop is None:
            stream.give(events)
        else:
            with suppress(RuntimeError):  # The event loop is closed, so nobody reads.
                stream.loop.call_soon_threadsafe(stream.give, events)
