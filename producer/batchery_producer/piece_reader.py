"""Reads the piece streams of many jobs with one connection and one command at a time.

A thread waits for the next entry of one stream, its wake stream, which has the pieces of all jobs
that are read here, and hands them to whoever reads. It reads the stream of a job where that may
have more: in the beginning, after a gap, at the end, and now and then, as workers of other kinds
know of no wake stream. Then it looks for results as well.
"""

import asyncio
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

from celery import Celery, uuid

from batchery.errors import BatchArgumentError, NoResult, UnknownJob
from batchery.protocol.pieces import (
    END,
    FIRST_ID,
    MAX_WAKES,
    PIECE,
    READER_S,
    RENEW_S,
    TOLD,
    WAKE_S,
    WOKEN,
    pieces_key,
    reader_key,
    wake_key,
    woken_key,
)
from batchery.redis_scripts import packed
from batchery.retry import REFUSALS, Interrupted, RetryPolicy
from batchery.transport.codec import read_json
from batchery_producer.answers import Answer
from batchery_producer.collector import read_stored, redis_backend

#: How long one command waits for a wake, in seconds. Redis may answer 0.1 s later, and must not be
#: taken for one that hangs: see `RetryPolicy.is_away`.
BLOCK_S = 0.8

#: How long it waits while a stream is full, in seconds: its reader goes on meanwhile.
FULL_BLOCK_S = 0.02

#: How often pieces and results are looked for of which no wake has told, in seconds.
LOOK_S = 0.5

#: How long whoever reads has the interpreter to itself before the next command is made, in seconds:
#: what has come is more urgent, and the next step of a model is far.
TURN_S = 0.0003

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

#: The ids of what a reader has who has nothing, and of no entry.
NOTHING_FETCHED, BEYOND_ALL = (0, 0), (2**64, 0)

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


class Following(Protocol):
    """Who reads the stream of a job."""

    id: str
    #: Key of the stream; its reader sets it.
    key: bytes
    #: Where `give` must be called; None for any thread.
    loop: asyncio.AbstractEventLoop | None
    #: Id of the last entry that was fetched for it.
    fetched: EntryId
    #: Whether the stream says that the result is stored.
    saw_end: bool
    #: Whether its job has been sent, for sure.
    is_known: bool
    #: How long its pieces are of use once its job has ended, in seconds; None for as long as usual.
    keep_s: int | None

    @property
    def backlog(self) -> int:
        """Number of events that were not taken yet."""

    def give(self, events: Sequence[Event]) -> None:
        """Takes events."""


class Question(NamedTuple):
    """What is asked in one round trip."""

    #: After which entry to read streams, by key.
    after: Mapping[bytes, EntryId]
    #: Ids of jobs that may not exist, of those whose results are looked for, and of those to renew.
    unknown: Sequence[str]
    looked: Sequence[str]
    renewed: Sequence[str]
    #: How long to wait for a wake; None for not at all.
    block_ms: int | None


class Reply(NamedTuple):
    """What Redis says to a question."""

    #: By job id: whether it has a stream; and what is stored of it.
    exists: Mapping[str, Any]
    stored: Mapping[str, bytes | None]
    #: By the key of a stream: its entries; and what wakes have of it, each the number of a piece,
    #: it, and those after it. Whoever sends jobs may write other things there, too.
    entries: Mapping[bytes, Any]
    wakes: Mapping[bytes, Sequence[Any]]


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
        self._streams: dict[bytes, list[ref[Following]]] = {}
        #: Keys of streams that must be read, as they may have more than was fetched.
        self._behind: set[bytes] = set()
        self._look_at_s = self._renew_at_s = 0.0
        self._wake_key = wake_key(backend, uuid())
        #: Id of the last wake.
        self._woken = "0-0"

    def open(self, streams: Sequence[Following], timeout_s: float | None = None) -> None:
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

    def follow(self, stream: Following) -> None:
        """Follows the stream of a job that was sent before; at once after `wake`."""
        self._add([stream])

    def wake(self) -> None:
        """Has the thread look at once for streams that were added; it will do so in a moment."""
        with suppress(*self._errors):
            self._send(self._spell_wake())

    def drop(self, streams: Iterable[Following]) -> None:
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

    def forget(self, streams: Iterable[Following]) -> None:
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

    def _add(self, streams: Sequence[Following]) -> None:
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
        """Sends commands in one round trip; their answers.

        A pipeline of redis-py takes as long as all else that is done with the pieces here.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command((packed(*commands),))
            return [connection.read_response() for _ in commands]
        except BaseException:
            connection.disconnect()  # There may be answers that were not read.
            raise
        finally:
            pool.release(connection)

    def _list(self, keys: Iterable[bytes]) -> list[Following]:
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
        """Waits for pieces, and hands them on."""
        # Nothing here may hold a stream while this waits: those that were dropped must go.
        question = self._plan(time.monotonic())
        reply = self.retries.call(partial(self._ask, question), self._errors)
        came: list[tuple[Following, Sequence[Event]]] = []
        for stream in self._list(dict.fromkeys((*question.after, *reply.wakes))):
            events = self._take_in(stream, question, reply) if question.after else []
            if events and not isinstance(events[-1], StreamPiece):
                self.drop([stream])  # Nothing comes after what ends a stream.
            elif wakes := reply.wakes.get(stream.key):
                events += self._take_wakes(stream, wakes, MAX_BACKLOG - len(events))
            if events:
                came.append((stream, events))
        _give(came)
        if came:
            time.sleep(TURN_S)

    def _plan(self, now_s: float) -> Question:
        """What to ask, and how long to wait for it."""
        with self._lock:
            if is_due := now_s >= self._look_at_s:
                self._look_at_s = now_s + LOOK_S
                for key, group in list(self._streams.items()):
                    if all(each() is None for each in group):
                        del self._streams[key]
                self._behind.update(self._streams)
            behind = list(self._behind)
            self._behind.clear()
            renewed_keys: Sequence[bytes] = ()
            if now_s >= self._renew_at_s:
                self._renew_at_s = now_s + RENEW_S
                renewed_keys = list(self._streams)
        after: dict[bytes, EntryId] = {}
        is_full = False
        streams = self._list(behind)
        for stream in streams:
            if stream.backlog >= MAX_BACKLOG:
                is_full = True
                self._behind.add(stream.key)
            # Of two that follow one job, the one that has less of it.
            else:
                after[stream.key] = min(after.get(stream.key, stream.fetched), stream.fetched)
        unknown = list(dict.fromkeys(each.id for each in streams if not each.is_known))
        asked = [each.id for each in streams if is_due or each.saw_end or not each.is_known]
        looked = list(dict.fromkeys(asked))
        renewed = [each.id for each in self._list(renewed_keys)]
        block_ms = int(FULL_BLOCK_S * 1000) if is_full else self._block_ms
        return Question(after, unknown, looked, renewed, None if after or looked else block_ms)

    def _ask(self, question: Question) -> Reply:
        """Sends all that in one round trip; safe to repeat."""
        after, unknown, looked, renewed, block_ms = question
        commands = self._spell_wake() if renewed else []
        for task_id in renewed:
            # It brings no key back that somebody has removed.
            commands.append(("EXPIRE", reader_key(self.backend, task_id), READER_S))
        # Before the stream is read: what comes then is in a wake.
        for task_id in unknown:
            commands += self._spell_woken(task_id)
        ignored = len(commands)
        for task_id in unknown:
            commands.append(("EXISTS", pieces_key(self.backend, task_id)))
        # Results are looked for first: what was sent before them is read by now.
        if looked:
            commands.append(("MGET", *map(self.backend.get_key_for_task, looked)))
        if after:
            ids = ("{}-{}".format(*each) for each in after.values())
            commands.append(("XREAD", "COUNT", COUNT, "STREAMS", *after, *ids))
        block = () if block_ms is None else ("BLOCK", block_ms)
        commands.append(("XREAD", *block, "STREAMS", self._wake_key, self._woken))
        answers = iter(self._send(commands)[ignored:])
        return Reply(
            {task_id: next(answers) for task_id in unknown},
            dict(zip(looked, next(answers), strict=True)) if looked else {},
            # A mapping in RESP3, pairs in RESP2.
            dict(next(answers) or ()) if after else {},
            self._sort_wakes(dict(next(answers) or ()).get(self._wake_key, ())),
        )

    def _sort_wakes(self, entries: Sequence[Any]) -> Mapping[bytes, Sequence[Any]]:
        """What the entries of the wake stream have, by the key of each piece stream."""
        found = defaultdict[bytes, list[Any]](list)
        for id_, fields in entries:
            self._woken = id_.decode()
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            keys = entry.get(WOKEN, b"").split(b"\n")
            try:
                # All at once, as each reading costs as much as a piece.
                told = read_json(b"[%s]" % entry.get(TOLD, b""))
            except (ValueError, RecursionError):
                told = ()
            # Streams whose texts cannot be read are read themselves.
            for key, each in zip(keys, told if len(told) == len(keys) else keys, strict=True):
                found[key].append(each)
        if len(entries) >= MAX_WAKES:
            self._look_at_s = 0.0  # There may have been more.
        return found

    def _take_in(self, stream: Following, question: Question, reply: Reply) -> list[Event]:
        """The events that have come of a stream itself, and of the result of its job."""
        # One that was added meanwhile may lack what came before this.
        is_new = not (stream.is_known or stream.id in reply.exists)
        if is_new or question.after.get(stream.key, BEYOND_ALL) > stream.fetched:
            return []
        if not stream.is_known:
            # Whoever sends a job makes its stream first.
            is_there = reply.exists[stream.id] or reply.stored[stream.id] is not None
            stream.is_known = bool(is_there)
            if not stream.is_known:
                return [UnknownJob(UNKNOWN.format(stream.id))]
        entries = reply.entries.get(stream.key, ())
        has_more = len(entries) >= COUNT
        stored = NOT_LOOKED if has_more else reply.stored.get(stream.id, NOT_LOOKED)
        # The task of a job that has ended and left nothing ignores its results.
        is_over = stream.saw_end and stored is None
        try:
            events: list[Event] = list(_new_pieces(stream, entries))
            answer = Answer() if is_over else read_stored(self.backend, stored) if stored else None
            if answer is not None:
                events.append(answer)
        except Exception as error:  # noqa: BLE001 - a stream may hold anything
            events = [error]
        if has_more or stream.saw_end:
            self._behind.add(stream.key)
        return events

    def _take_wakes(
        self, stream: Following, wakes: Sequence[Any], room: int
    ) -> Sequence[StreamPiece]:
        """The pieces that wakes have of a stream; it is read where they are not the next ones.

        Args:
            stream: The stream.
            wakes: Those of a `Reply`.
            room: Number of pieces for which its reader has room, less those that wait for it.
        """
        pieces: list[StreamPiece] = []
        number, room = stream.fetched[0], room - stream.backlog
        for told in wakes:
            is_list = type(told) is list and len(told) > 1 and type(told[0]) is int
            is_next = is_list and 0 < told[0] <= number + 1
            if not is_next or len(pieces) + len(told) - 1 > room:
                self._behind.add(stream.key)
                break
            for value in told[number + 2 - told[0] :]:
                number += 1
                pieces.append(StreamPiece(f"{number}-0", value))
        if pieces:
            stream.fetched = number, 0
        return pieces


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
    for raw_id, (field, value, *_) in entries:
        id_ = raw_id.decode()
        order = parse_id(id_)
        if order <= stream.fetched:
            continue  # Somebody else who reads this stream has less of it.
        stream.saw_end = stream.saw_end or field == END
        (number, _), (before, _) = order, stream.fetched
        if field == PIECE and number > before + 1:
            raise NoResult(
                f"job {stream.id}: its pieces {before + 1} to {number - 1} were dropped"
                " before they were read; read faster, or raise stream_max_pieces, unless the"
                " worker's log says that it could not write them"
            )
        stream.fetched = order
        if field == PIECE:
            yield StreamPiece(id_, read_json(value))
