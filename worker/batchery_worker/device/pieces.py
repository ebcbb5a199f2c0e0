"""Partial results of jobs on their way from a device to the streams that their readers follow.

One thread writes, one script for all that has gathered since the last one: while Redis is away the
pieces wait, and the device goes on. Each write is fenced by the leases of its jobs. Between two
writes, a few times a second, the thread looks which jobs nobody reads any more.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import redis
from celery.backends.redis import RedisBackend
from kombu.utils import json

from batchery.cluster_client import find_tag, send_all
from batchery.errors import UnserialisableResult
from batchery.execution.batch import Receive, refuse_value
from batchery.outcomes import Failed, Partial
from batchery.protocol.pieces import (
    MAX_WAKES,
    MAX_WOKEN,
    PIECE,
    READER_S,
    keys_begin,
    mark_ended,
    piece_number,
    pieces_key,
    spell_wakes,
)
from batchery.transport.lease_store import LeaseStore
from batchery_worker.commit.committer import (
    MAX_BYTES_PER_SCRIPT,
    CommitStatus,
    LeaseBroker,
    RetryingRedis,
    connect_results,
    make_results_client,
    spell_database,
)
from batchery_worker.plain_values import is_plain, plain_json
from batchery_worker.work import PieceContext, Work

logger = logging.getLogger("batchery.device")

#: Maximum number of pieces per call of the script, during which Redis serves nobody else, besides
#: that of bytes; and of jobs: while it runs for some, readers are at work on what it has brought of
#: others.
MAX_PIECES_PER_SCRIPT = 2000
MAX_JOBS_PER_SCRIPT = 100

#: How often readers are looked for, in seconds; and where there are pieces, which go first.
LOOK_S, MAX_LOOK_S = 0.4, 1.0

#: After a call that took longer than the first, in seconds, Redis was away, for readers as well.
#: They are looked for after the second: those who are there have renewed their keys by then.
AWAY_S, RETURN_S = 1.0, 10.0

#: Why nothing is written of a job that has no stream: nobody has ever read it.
UNREAD = "unread"

#: Answers of the script, by their digits, after which nothing more is written of a job: another
#: worker has it, or its readers have gone, so that nobody wants it.
GONE = "2"
REFUSALS = {"0": CommitStatus.FENCED, GONE: CommitStatus.REVOKED, "3": UNREAD}

#: In the place of such an answer, for jobs whose pieces cannot be written.
LOST = "4"


class StreamedJob:
    """A job that somebody may read.

    Attributes:
        refusal: Why nothing more is written, one of `REFUSALS`; else empty.
        number: Number of the last piece that was given to the writer; set it to 0 where the job
            begins anew.
    """

    def __init__(self, backend: Any, task_id: str, token: str, context: PieceContext) -> None:
        self.task_id, self.token, self.context = task_id, token, context
        # Once for all pieces: Celery makes it anew each time.
        self.key = pieces_key(backend, task_id)
        #: Of its shard, in a cluster.
        self.tag = find_tag(self.key)
        self.refusal = ""
        self.number = 0
        #: Number of the last piece that waits or was sent.
        self._last = 0
        #: In JSON; the last one has the number `_last`.
        self._waiting: deque[bytes] = deque(maxlen=context.max_pieces)
        self.is_sending = self.is_broken = False

    @property
    def waits(self) -> bool:
        """Whether there are pieces to write."""
        return bool(self._waiting)

    def add(self, piece: bytes) -> None:
        """Adds the next piece, unless an earlier run has sent it."""
        self.number += 1
        if self.number > self._last and not self.refusal and not self.is_broken:
            self._last = self.number
            self._waiting.append(piece)

    def skip(self, number: int) -> None:
        """Goes on after a piece that an earlier run has sent."""
        self.number = self._last = number

    def take(self, count: int, size_bytes: int) -> tuple[int, list[bytes]]:
        """Takes so many waiting pieces, none after so many bytes, and the number of the first."""
        first, pieces = self._last - len(self._waiting) + 1, list[bytes]()
        while self._waiting and len(pieces) < count and size_bytes > 0:
            pieces.append(self._waiting.popleft())
            size_bytes -= len(pieces[-1])
        return first, pieces

    def lose(self) -> None:
        """Ends the stream where pieces were lost, after a gap, by which its readers know it."""
        self._waiting.clear()
        if self.is_broken:
            self.refuse(UNREAD)
        else:
            self.is_broken = True
            # Redis may have them all the same.
            self._last += 2
            self._waiting.append(b"null")

    def refuse(self, refusal: str) -> None:
        """Ends the stream; what waits is dropped."""
        self.refusal = refusal
        self._waiting.clear()


#: Pieces of jobs, each with the number of the first one.
Taken = dict[StreamedJob, tuple[int, list[bytes]]]


class PieceWriter:
    """Writes the pieces of a device's jobs; its thread starts with the first job that has any."""

    def __init__(self, backend: Any) -> None:
        """Does not connect yet; pieces are written if Celery's result backend is one for Redis."""
        self._backend = backend
        connect = partial(make_results_client, backend)
        # For each thread its own: the writer, whoever prepares batches, and whoever answers them.
        self._servers = connect_results(backend, lambda: None)
        self._read, self._ended = (RetryingRedis(connect, lambda: None) for _ in range(2))
        #: Whether leases may be on the server of results: in a cluster they are in other shards.
        self._may_have_leases = b"" in self._servers
        self._broker = LeaseBroker(lambda: None)
        #: Guards the jobs; notified when there is something to write, and when it is written.
        self._changed = threading.Condition()
        #: The streamed jobs of each batch, by their indexes in it.
        self._open: dict[int, dict[int, StreamedJob]] = {}
        #: Jobs with pieces that wait; those of one lease store are written together. Two of them
        #: have the same task id where a message was published twice.
        self._waiting: dict[StreamedJob, None] = {}
        self._thread: threading.Thread | None = None
        #: When readers were looked for, on the clock of `time.monotonic`; later than now where
        #: they are to come back first.
        self._looked_s = 0.0
        #: Id of a worker that the backend's server does not know.
        self._elsewhere = ""

    def open(self, work: Work) -> Mapping[int, StreamedJob]:
        """The streamed jobs of a batch, by their indexes in it; until `end`."""
        context = work.pieces
        if context is None or not isinstance(self._backend, RedisBackend):
            return {}
        jobs = {
            index: StreamedJob(self._backend, work.jobs[index][0], token, context)
            for index, token in context.tokens.items()
        }
        with self._changed:
            self._open[work.id] = jobs
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="batchery-pieces", daemon=True
                )
                self._thread.start()
        return jobs

    def read(self, work: Work) -> list[Any]:
        """Opens a batch of one job; the pieces that earlier runs of that job have sent.

        The job goes on after them. Waits as long as Redis is away.

        Returns:
            All of them, in order; empty if there are none, or not all are there any more. Then the
            job must begin anew, and what its readers have is not sent again.
        """
        for job in self.open(work).values():
            if job.task_id not in job.context.resumed:
                continue
            with suppress(Exception):  # Whoever sends jobs may have put anything there.
                entries, _ = self._read.attempt(partial(_read_all, job.key), job.key)
                sent = [(piece_number(id_), each[PIECE]) for id_, each in entries if PIECE in each]
                if [number for number, _ in sent] == list(range(1, len(sent) + 1)):
                    pieces = [json.loads(piece) for _, piece in sent]
                    job.skip(len(pieces))
                    return pieces
        return []

    def receive(self, work: Work) -> Receive:
        """Takes the partial results of a batch function; see `run_function`."""
        streamed = self._open.get(work.id, {})
        owners = [index for index, (_, items, _) in enumerate(work.jobs) for _ in items]

        def begin(part: Sequence[int]) -> Callable[[Partial], None]:
            jobs = [streamed.get(owners[position]) for position in part]
            for job in jobs:
                if job is not None:
                    job.number = 0

            def take(piece: Partial) -> None:
                job = jobs[piece.index]
                if job is not None:
                    text = _encode(piece.piece)
                    with self._changed:
                        self._add(job, text)
                        self._changed.notify_all()

            return take

        return begin

    def write(self, pieces: Mapping[int, Sequence[Any]]) -> Mapping[int, Failed | CommitStatus]:
        """Writes what a step has made of jobs, soon; does not wait.

        Args:
            pieces: By `Work.id`, of batches of one job.

        Returns:
            The jobs that must leave their slots, by `Work.id`, until they have left:
            `FENCED` where another worker has the job, `REVOKED` where nobody reads it any more, a
            failure where JSON cannot write a piece.
        """
        refused: dict[int, Failed | CommitStatus] = {}
        with self._changed:
            for work_id, jobs in self._open.items():
                for job in jobs.values():
                    try:
                        for piece in pieces.get(work_id, ()):
                            self._add(job, _encode(piece))
                    except UnserialisableResult as error:
                        refused[work_id] = Failed(error)
                    if job.refusal not in ("", UNREAD):
                        refused[work_id] = CommitStatus(job.refusal)
            if pieces:
                self._changed.notify_all()
        return refused

    def flush(self, work: Work) -> None:
        """Waits until all pieces of a batch are written, as long as Redis is away."""
        if work.id in self._open:
            jobs = self._open[work.id].values()
            with self._changed:
                self._changed.wait_for(lambda: not any(job.waits or job.is_sending for job in jobs))

    def end(self, work: Work, statuses: Sequence[str]) -> None:
        """Forgets a batch, and tells the readers of its jobs whose results are stored."""
        if work.id not in self._open:
            return
        with self._changed:
            jobs = self._open.pop(work.id)
        stored = [
            job.task_id
            for index, job in jobs.items()
            if statuses[index] == CommitStatus.COMMITTED and job.refusal != UNREAD
        ]
        if stored:
            with suppress(redis.RedisError, OSError):  # Readers also look for results.
                mark_ended(self._ended.client, self._backend, stored)

    def _add(self, job: StreamedJob, piece: bytes) -> None:
        job.add(piece)
        if job.waits:
            self._waiting[job] = None

    def _run(self) -> None:
        while True:
            with self._changed:
                looked = self._await()
                taken = {job: (0, list[bytes]()) for job in looked} if looked else self._take()
            began_s = time.monotonic()
            answers = self._write(next(iter(taken)).context, taken, bool(looked))
            if time.monotonic() - began_s > AWAY_S:
                self._looked_s = time.monotonic() + RETURN_S
                if looked:
                    continue  # Readers could not renew their keys either.
            with self._changed:
                for (job, (_, pieces)), answer in zip(taken.items(), answers, strict=True):
                    job.is_sending = False
                    if answer == LOST and pieces:
                        job.lose()
                        if job.waits:
                            self._waiting[job] = None
                    elif answer in REFUSALS:
                        job.refuse(REFUSALS[answer])
                self._changed.notify_all()

    def _await(self) -> Sequence[StreamedJob]:
        """Waits for pieces, or until readers are to be looked for; the jobs of these."""
        while True:
            now_s = time.monotonic()
            if self._waiting and now_s < self._looked_s + MAX_LOOK_S:
                return ()
            jobs = [job for each in self._open.values() for job in each.values() if not job.refusal]
            left_s = self._looked_s + LOOK_S - now_s
            if jobs and left_s <= 0:
                self._looked_s = now_s
                return _of_one_store(jobs)
            self._changed.wait(left_s if jobs else None)

    def _take(self) -> Taken:
        """Takes what waits of some jobs."""
        left, left_bytes, taken = MAX_PIECES_PER_SCRIPT, MAX_BYTES_PER_SCRIPT, Taken()
        for job in _of_one_store(self._waiting)[:MAX_JOBS_PER_SCRIPT]:
            taken[job] = _, pieces = job.take(left, left_bytes)
            job.is_sending = True
            left -= len(pieces)
            left_bytes -= sum(map(len, pieces))
            if not job.waits:
                del self._waiting[job]
            if not left or left_bytes <= 0:
                break
        return taken

    def _write(self, context: PieceContext, taken: Taken, looks: bool) -> str:
        """Writes pieces, as long as Redis is away; a digit for each job."""
        store = context.store
        try:
            if store is None:
                return self._call(context, taken, looks) or ""
            if self._may_have_leases and store.worker != self._elsewhere:
                answer = self._call(context, taken, looks, store.db)
                if answer is not None:
                    return answer
                self._elsewhere = store.worker
            return self._write_in_steps(store, context, taken, looks)
        except Exception:
            # The jobs go on, and their results tell everything.
            logger.exception("pieces of %d jobs cannot be written, and are lost", len(taken))
            return LOST * len(taken)

    def _write_in_steps(
        self, store: LeaseStore, context: PieceContext, taken: Taken, looks: bool
    ) -> str:
        """Writes where the leases are on another server."""
        keys, tokens = (store.keys.workers, store.lease_key), " ".join(j.token for j in taken)
        held = self._broker.ask("held", store, keys, store.worker, tokens)
        if held is None:
            # This worker counts as dead; who has its jobs now writes their pieces.
            return "3" * len(taken)
        is_held = dict(zip(taken, held.decode(), strict=True))
        ours = {job: each for job, each in taken.items() if is_held[job] == "1"}
        answers = iter(self._call(context, ours, looks) or "")
        return "".join(next(answers) if job in ours else "0" for job in taken)

    def _call(
        self, context: PieceContext, taken: Taken, looks: bool, broker_db: int | None = None
    ) -> str | None:
        """Runs the script; a digit for each job, None if this server does not know the worker.

        Args:
            context: That of the jobs.
            taken: Their pieces, each with the number of the first one.
            looks: Whether readers are looked for.
            broker_db: Number of the broker's database; None if that is on another server.
        """
        shards = defaultdict[bytes, Taken](dict)
        for job, pieces in taken.items():
            shards[job.tag][job] = pieces
        sent = [self._send(tag, context, part, looks, broker_db) for tag, part in shards.items()]
        digits, woken = dict[StreamedJob, str](), defaultdict[bytes, list[bytes]](list)
        for part, read_answer in zip(shards.values(), sent, strict=True):
            answer, _ = read_answer()
            if answer is None:
                return None
            if isinstance(answer, list):
                answer, *told = answer
                for key, streams in zip(told[::2], told[1::2], strict=True):
                    woken[key].append(streams)
            digits.update(zip(part, answer.decode(), strict=True))
        if commands := spell_wakes(self._backend, woken):
            with suppress(redis.RedisError, OSError):  # Readers look for pieces now and then.
                send_all(self._waker, commands)
        return "".join(digits[job] for job in taken)

    @cached_property
    def _waker(self) -> Any:
        return make_results_client(self._backend)

    def _send(
        self, tag: bytes, context: PieceContext, taken: Taken, looks: bool, broker_db: int | None
    ) -> Callable[[], tuple[Any, int]]:
        """Sends the script to one server, or one shard; what reads its answer."""
        store, results = context.store, self._servers[tag]
        lease_keys: tuple[Any, Any] = (tag, tag)
        if store is not None and not tag:
            lease_keys = (store.keys.workers, store.lease_key)
        keys = *lease_keys, *(job.key for job in taken)
        args = (
            "" if store is None else store.worker,
            spell_database(results.client.connection_pool),
            "" if broker_db is None else broker_db,
            context.max_pieces,
            int((READER_S - context.grace_s) * 1000) if looks else "",
            *(keys_begin(self._backend, next(iter(taken)).task_id), MAX_WAKES, MAX_WOKEN),
            # One text each, as both sides take each argument apart on its own.
            " ".join(job.token for job in taken),
            " ".join(str(first) for first, _ in taken.values()),
            " ".join(str(len(pieces)) for _, pieces in taken.values()),
            *(piece for _, pieces in taken.values() for piece in pieces),
        )
        return results.send(
            lambda server: server.scripts.send("pieces", keys, *args), lease_keys[1]
        )


def _of_one_store(jobs: Collection[StreamedJob]) -> Sequence[StreamedJob]:
    """Those of the jobs whose leases the same store has as that of the first."""
    store = next(iter(jobs)).context.store
    return [job for job in jobs if job.context.store is store]


def _read_all(key: bytes, results: RetryingRedis) -> Any:
    return results.client.xrange(key)


def _encode(piece: Any) -> bytes:
    """A piece as JSON.

    Raises:
        UnserialisableResult: JSON cannot write it.
    """
    try:
        return plain_json(piece) if is_plain(piece) else json.dumps(piece).encode()
    except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
        raise refuse_value(piece, error).exception from None
