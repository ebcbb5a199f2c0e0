"""The fast way of a result: the device stores it, notifies its caller and ends its lease.

All results of a batch are stored in one step. Each result is written only while its job's lease is
held, so a worker that counts as dead changes nothing when it wakes up. Where results are on another
server than the leases, the one step becomes three. Jobs that are not plain are left to Celery's
tracer.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

import redis

from batchery.protocol.completion_stream import expires_s, stream_key
from batchery_worker.commit.server import RetryingRedis, get_database
from batchery_worker.commit.stored_form import encode_fields
from batchery_worker.ipc.messages import CommitContext, JobCommit
from batchery_worker.ipc.values import plain_json

logger = logging.getLogger("batchery.device")

#: Maximum number of jobs per call of the script, during which Redis serves nobody else.
MAX_JOBS_PER_SCRIPT = 512

#: Number of bytes after which no further result is added to a call, for the same reason.
MAX_BYTES_PER_SCRIPT = 4 << 20

#: Kinds of outcomes that are results, in the words of `encode_outcome`.
STORABLE_KINDS = ("value", "json", "encoded")


class MetaWriter:
    """Writes the results of one batch as Celery stores them."""

    def __init__(self, date_done: str, info: Mapping[str, Any]) -> None:
        """Writes the part that is the same for all jobs.

        Args:
            date_done: When the batch was done, in Celery's format.
            info: Facts of the batch; not empty.
        """
        self._head = (
            '{"status": "SUCCESS", "traceback": null, "children": [], '
            f'"date_done": {json.dumps(date_done)}, '
            f'"batch": {json.dumps(info)[:-1]}, "waited_ms": '
        )

    def write(
        self, task_id: str, result: bytes, waited_ms: float, fields: Mapping[str, Any]
    ) -> bytes:
        """Writes the stored result of one job.

        Args:
            task_id: Id of the job.
            result: Its result, as JSON in UTF-8.
            waited_ms: How long it waited in the worker.
            fields: Further fields, from `stored_fields`.

        Raises:
            TypeError: JSON cannot write a field.
            ValueError: JSON cannot write a field either.
        """
        text = f'{self._head}{waited_ms!r}}}, {encode_fields(task_id, fields)}, "result": '
        return b"%b%b}" % (text.encode(), result)


class CommitStatus(StrEnum):
    """What became of one job at the commit."""

    #: Redis has the result, the notification and the acknowledgement.
    COMMITTED = "committed"
    #: This worker has lost the lease; another worker has the job.
    FENCED = "fenced"
    #: Celery's tracer completes it, in the main process.
    NEEDS_TRACER = "needs tracer"


@dataclass(frozen=True, slots=True)
class EncodedOutcome:
    """A job's outcome, encoded by `encode_outcome`."""

    task_id: str
    spelled: Sequence[Any]


class Committer(Protocol):
    """Stores the results of a batch; called on the commit thread of a device process."""

    def commit(
        self, jobs: Sequence[EncodedOutcome], context: CommitContext, info: Mapping[str, Any]
    ) -> Sequence[CommitStatus]:
        """Stores the results that it can store.

        Args:
            jobs: The outcomes of one batch.
            context: The commit context of the batch, from the main process.
            info: Facts of the batch, stored with each result.

        Returns:
            One status per job, in order.
        """
        ...


#: The statuses by their numbers in commit.lua.
COMMIT_STATUSES = (CommitStatus.FENCED, CommitStatus.COMMITTED, CommitStatus.NEEDS_TRACER)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One job in a call of the script."""

    index: int
    task_id: str
    key: bytes
    token: str
    #: The stored result; empty for a job that ignores its result.
    value: bytes


class RedisCommitter:
    """Commits to the result backend's Redis, in one step if that has the leases, too."""

    def __init__(
        self,
        backend: Any,
        connect_broker: Callable[[], Any],
        on_wait: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's result backend for Redis, of the thread that commits.
            connect_broker: Makes a client of the broker's database, if that is on another server.
            on_wait: Called when results must wait because Redis is away.
            sleep: Waits for a number of seconds.
        """
        self._backend = backend
        self._results = RetryingRedis(lambda: backend.client, on_wait, sleep)
        self._broker = RetryingRedis(connect_broker, on_wait, sleep)
        self._refusals: set[str] = set()
        #: Id of a worker that the backend's server does not know. A fenced worker gets another id.
        self._elsewhere = ""
        #: Id of a worker that the broker does not know either.
        self._unknown = ""

    def commit(
        self, jobs: Sequence[EncodedOutcome], context: CommitContext, info: Mapping[str, Any]
    ) -> Sequence[CommitStatus]:
        """Stores the results that it can store; waits as long as Redis is away."""
        statuses = [CommitStatus.NEEDS_TRACER] * len(jobs)
        if context.worker == self._unknown:
            return statuses
        # Celery's own `now` reads settings, and so takes four times as long.
        writer = MetaWriter(datetime.now(self._backend.app.timezone).isoformat(), info)
        entries = [
            self._entry(index, job, context.jobs[index], writer) for index, job in enumerate(jobs)
        ]
        for part in _parts([entry for entry in entries if entry is not None]):
            for entry, status in zip(part, self._run(part, context), strict=True):
                statuses[entry.index] = status
        return statuses

    def _entry(
        self, index: int, job: EncodedOutcome, context: JobCommit, writer: MetaWriter
    ) -> _Entry | None:
        """Makes the script's entry for a job; None if the job needs the tracer."""
        kind, content = job.spelled[0], job.spelled[1]
        if context is None or kind not in STORABLE_KINDS:
            return None
        token, waited_ms, fields = context
        try:
            key = self._backend.get_key_for_task(job.task_id)
            value = b""
            if fields is not None:
                value = writer.write(job.task_id, _json(kind, content), waited_ms, fields)
        except (TypeError, ValueError, RecursionError):
            # For instance arguments that JSON cannot write. The tracer tells the caller.
            return None
        if len(value) > self._backend._MAX_STR_VALUE_SIZE:
            return None
        return _Entry(index, job.task_id, key, token, value)

    def _run(self, part: Sequence[_Entry], context: CommitContext) -> Sequence[CommitStatus]:
        try:
            if context.worker != self._elsewhere:
                answer, tries = self._store(part, context, context.broker_db)
                if answer is not None:
                    return [
                        _status(entry, COMMIT_STATUSES[digit], tries)
                        for entry, digit in zip(part, _digits(answer), strict=True)
                    ]
                self._elsewhere = context.worker
            return self._run_in_steps(part, context)
        except (redis.RedisError, OSError) as refusal:
            self._complain(refusal)
            return [CommitStatus.NEEDS_TRACER] * len(part)

    def _run_in_steps(
        self, part: Sequence[_Entry], context: CommitContext
    ) -> Sequence[CommitStatus]:
        """Commits where the leases are on another server; a job without a lease is not touched.

        The leases end last. If this process dies before that, the jobs run again, and what they
        answer then is not stored: a SUCCESS is never overwritten.
        """
        worker, keys = context.worker, (context.workers_key, context.lease_key)
        held = self._ask_broker("held", context, keys, worker, _tokens(part))
        if held is None:
            self._unknown = worker
            # The next worker id may be of another broker.
            self._broker.disconnect()
            return [CommitStatus.NEEDS_TRACER] * len(part)
        statuses = {entry.index: CommitStatus.FENCED for entry in part}
        ours = [entry for entry, is_held in zip(part, _digits(held), strict=True) if is_held]
        if ours:
            answer, _ = self._store(ours, context, None)
            assert answer is not None
            for entry, digit in zip(ours, _digits(answer), strict=True):
                statuses[entry.index] = COMMIT_STATUSES[digit]
            ended = [each for each in ours if statuses[each.index] is CommitStatus.COMMITTED]
            if ended:
                self._ask_broker("end", context, keys[1:], _tokens(ended))
        return [statuses[entry.index] for entry in part]

    def _ask_broker(
        self, script: str, context: CommitContext, keys: Sequence[str], *args: str
    ) -> bytes | None:
        answer: bytes | None
        answer, _ = self._broker.attempt(
            lambda broker: broker.scripts.run_once(script, keys, *args), context.lease_key
        )
        return answer

    def _store(
        self, part: Sequence[_Entry], context: CommitContext, broker_db: int | None
    ) -> tuple[bytes | None, int]:
        """Runs the script; its answer, and the number of failed tries before it.

        Args:
            part: What it stores.
            context: The commit context of the batch.
            broker_db: Number of the broker's database; None if that is on another server.
        """
        keys: list[Any] = [context.workers_key, context.lease_key, *(entry.key for entry in part)]
        args: list[Any] = [
            context.worker,
            get_database(self._results.client),
            "" if broker_db is None else broker_db,
            self._expiries(part, context.keep_s),
            len(context.completion_streams),
            _tokens(part),
            *(entry.value for entry in part),
        ]
        if context.completion_streams:
            self._add_completion_streams(keys, args, part, context.completion_streams)
        return self._results.attempt(
            lambda results: results.scripts.run_once("commit", keys, *args), context.lease_key
        )

    def _expiries(self, part: Sequence[_Entry], keep_s: Mapping[int, int]) -> str:
        """In how many seconds each result expires; once if that is the same for all."""
        app_s = self._backend.expires
        if not keep_s:
            return str(expires_s(app_s, None))
        return " ".join(str(expires_s(app_s, keep_s.get(entry.index))) for entry in part)

    def _add_completion_streams(
        self,
        keys: list[Any],
        args: list[Any],
        part: Sequence[_Entry],
        completion_streams: Mapping[str, Sequence[int]],
    ) -> None:
        numbers = {entry.index: number for number, entry in enumerate(part, 1)}
        for name, indexes in completion_streams.items():
            keys.append(stream_key(self._backend, name))
            present = [index for index in indexes if index in numbers]
            args.append(len(present))
            for index in present:
                number = numbers[index]
                args += (number, part[number - 1].task_id)

    def _complain(self, refusal: Exception) -> None:
        if str(refusal) not in self._refusals:
            self._refusals.add(str(refusal))
            logger.error("Redis refuses commits, so Celery's tracer stores results: %s", refusal)


def _tokens(entries: Iterable[_Entry]) -> str:
    """The tokens of jobs, as the scripts take them."""
    return " ".join(entry.token for entry in entries)


def _digits(answer: bytes) -> Iterator[int]:
    """The digits of a script's answer."""
    return (byte - ord("0") for byte in answer)


def _json(kind: str, content: Any) -> bytes:
    """The JSON of a result that `encode_outcome` encoded as one of `STORABLE_KINDS`."""
    if kind == "encoded":
        encoded: bytes = content
        return encoded
    return content.encode() if kind == "json" else plain_json(content)


def _parts(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """Cuts a batch into parts, one for each call of the script."""
    part: list[_Entry] = []
    size_bytes = 0
    for entry in entries:
        part.append(entry)
        size_bytes += len(entry.value)
        if len(part) == MAX_JOBS_PER_SCRIPT or size_bytes >= MAX_BYTES_PER_SCRIPT:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _status(entry: _Entry, status: CommitStatus, tries: int) -> CommitStatus:
    """Counts a job as committed if an earlier try, whose answer was lost, has ended its lease.

    The script recognises such a job by its stored result, and cannot if there is none. If another
    worker has the job after all, it runs there once more, and stores nothing there either.
    """
    if status is CommitStatus.FENCED and tries and not entry.value:
        return CommitStatus.COMMITTED
    return status
