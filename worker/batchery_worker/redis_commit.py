"""Stores the results of a batch where they were computed, with notifications and acks: one step.

Each is written only while its job's lease is held, so that a worker that was given up for dead
changes nothing when it wakes up. Whatever is not plain is left to Celery's tracer.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import redis

from batchery.reply import reply_key
from batchery_worker.commit import Settled, Verdict
from batchery_worker.meta import MetaWriter
from batchery_worker.plain import plain_json
from batchery_worker.terms import JobTerms, Terms

logger = logging.getLogger("batchery.device")

LUA = Path(__file__).parent / "lua"

#: Most jobs of one script, and most bytes after which no further result is added to it: Redis
#: serves nobody else meanwhile.
MAX_JOBS = 512
MAX_BYTES = 4 << 20

#: How often a commit is sent to a Redis that is well before the tracer may try. A lost connection
#: explains the first failure, a failover the second.
TRIES = 3

#: Pause before Redis is asked again whether it is back, in seconds; doubled up to the other.
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0

#: Says that no Redis is there, or only a replica.
AWAY = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, OSError)

#: Says that Redis is there and cannot write: a full disk, a server that is not ready.
CANNOT_WRITE = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY")

#: Kinds of outcomes, as `encode_outcome` spells them, that are results.
STORABLE = ("value", "json", "encoded")

#: As commit.lua numbers them.
VERDICTS = (Verdict.FENCED, Verdict.COMMITTED, Verdict.NEEDS_TRACER)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One job of a script."""

    index: int
    task_id: str
    key: bytes
    token: str
    #: What is stored; empty for a job whose result nobody wants.
    value: bytes


class RedisCommitter:
    """Commits to the result backend's Redis, in which the broker's database is, too."""

    def __init__(
        self,
        backend: Any,
        on_wait: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's own for Redis, of the thread that commits.
            on_wait: Called when results have to wait for a Redis that is away.
            sleep: Waits for so many seconds.
        """
        self._backend = backend
        self._on_wait = on_wait
        self._sleep = sleep
        self._refusals: set[str] = set()
        #: Id of a worker that this Redis does not know. Once given up, a worker has another id.
        self._unknown = ""

    def commit(
        self, jobs: Sequence[Settled], terms: Terms, facts: Mapping[str, Any]
    ) -> Sequence[Verdict]:
        """Stores what it can; while Redis is away it waits, as long as this process lives."""
        verdicts = [Verdict.NEEDS_TRACER] * len(jobs)
        if terms.worker == self._unknown:
            return verdicts
        writer = MetaWriter(self._backend.app.now().isoformat(), facts)
        entries = [
            self._entry(index, job, terms.jobs[index], writer) for index, job in enumerate(jobs)
        ]
        for part in _parts([entry for entry in entries if entry is not None]):
            for entry, verdict in zip(part, self._run(part, terms), strict=True):
                verdicts[entry.index] = verdict
        return verdicts

    def _entry(
        self, index: int, job: Settled, terms: JobTerms, writer: MetaWriter
    ) -> _Entry | None:
        """What the script needs of a job; None if the tracer shall have it."""
        kind, content = job.spelled[0], job.spelled[1]
        if terms is None or kind not in STORABLE:
            return None
        token, waited_ms, fields = terms
        try:
            key = self._backend.get_key_for_task(job.task_id)
            value = b""
            if fields is not None:
                value = writer.write(job.task_id, _json(kind, content), waited_ms, fields)
        except (TypeError, ValueError, RecursionError):
            # Arguments that were never JSON, for instance. The tracer says so to the caller.
            return None
        if len(value) > self._backend._MAX_STR_VALUE_SIZE:
            return None
        return _Entry(index, job.task_id, key, token, value)

    def _run(self, part: Sequence[_Entry], terms: Terms) -> Sequence[Verdict]:
        keys = [terms.workers_key, terms.lease_key, *(entry.key for entry in part)]
        expires_s = int(self._backend.expires or 0)
        args: list[Any] = [terms.worker, self._db, terms.broker_db, expires_s, len(terms.replies)]
        for entry in part:
            args += (entry.token, entry.value)
        if terms.replies:
            self._add_replies(keys, args, part, terms.replies)
        answers, tries = self._answers(keys, args)
        if answers is None:
            return [Verdict.NEEDS_TRACER] * len(part)
        return [
            _verdict(entry, VERDICTS[answer], tries)
            for entry, answer in zip(part, answers, strict=True)
        ]

    def _add_replies(
        self,
        keys: list[Any],
        args: list[Any],
        part: Sequence[_Entry],
        replies: Mapping[str, Sequence[int]],
    ) -> None:
        numbers = {entry.index: number for number, entry in enumerate(part, 1)}
        for name, indexes in replies.items():
            keys.append(reply_key(self._backend, name))
            wanted = [index for index in indexes if index in numbers]
            args.append(len(wanted))
            for index in wanted:
                number = numbers[index]
                args += (number, part[number - 1].task_id)

    def _answers(self, keys: list[Any], args: list[Any]) -> tuple[list[int] | None, int]:
        """What the script says, None if it is refused; and after how many failed tries."""
        worker, lease_key = args[0], keys[1]
        for tries in range(TRIES):
            try:
                answers = self._script(keys=keys, args=args)
            except (redis.RedisError, OSError) as error:
                self._await_redis(lease_key, error)
                refusal = error
            else:
                if answers is None:
                    self._unknown = worker
                return answers, tries
        self._complain(refusal)
        return None, TRIES

    def _complain(self, refusal: Exception) -> None:
        if str(refusal) not in self._refusals:
            self._refusals.add(str(refusal))
            logger.error("Redis refuses commits, so Celery's tracer stores results: %s", refusal)

    def _await_redis(self, lease_key: str, error: Exception) -> None:
        """Returns when Redis can write, at once if it could all the time."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                # A write, as those alone may be refused; there is no such field.
                self._client.hdel(lease_key, "")
            except (redis.RedisError, OSError) as still:
                if not is_away(still):
                    return
                error = still
            else:
                return
            if pause_s == FIRST_PAUSE_S:
                logger.warning("results wait for Redis: %s", error)
                self._on_wait()
            # The address may be another server's by now.
            self._client.connection_pool.disconnect()
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    @cached_property
    def _client(self) -> Any:
        return self._backend.client

    @cached_property
    def _db(self) -> int:
        return database_of(self._client)

    @cached_property
    def _script(self) -> Any:
        return _Script(self._client, script_text("commit"))


class _Script:
    """A script, sent as directly as can be: redis-py's own way takes 20 us more of each commit."""

    def __init__(self, client: Any, text: str) -> None:
        self._pool = client.connection_pool
        self._script = client.register_script(text)

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        connection = self._pool.get_connection()
        try:
            connection.send_command("EVALSHA", self._script.sha, len(keys), *keys, *args)
            return connection.read_response()
        except redis.exceptions.NoScriptError:
            pass  # It is loaded below.
        finally:
            self._pool.release(connection)
        return self._script(keys=keys, args=args)


def _json(kind: str, content: Any) -> bytes:
    """The JSON of a result that `encode_outcome` spelled as one of `STORABLE`."""
    if kind == "encoded":
        encoded: bytes = content
        return encoded
    return content.encode() if kind == "json" else plain_json(content)


def database_of(client: Any) -> int:
    """Number of the database that a client works in."""
    return int(client.connection_pool.connection_kwargs.get("db") or 0)


def script_text(name: str) -> str:
    """Text of a script that writes results; `name` without ending."""
    return (LUA / "result.lua").read_text() + (LUA / f"{name}.lua").read_text()


def _parts(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """Cuts a batch into scripts."""
    part: list[_Entry] = []
    size_bytes = 0
    for entry in entries:
        part.append(entry)
        size_bytes += len(entry.value)
        if len(part) == MAX_JOBS or size_bytes >= MAX_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _verdict(entry: _Entry, verdict: Verdict, tries: int) -> Verdict:
    """Takes a job for committed whose lease went when the answer to an earlier try was lost.

    The script tells such a job by what is stored. Nothing is where no result is wanted; if another
    worker had the job after all, then it runs once more and still leaves no trace.
    """
    if verdict is Verdict.FENCED and tries and not entry.value:
        return Verdict.COMMITTED
    return verdict


def is_away(error: Exception) -> bool:
    """Whether Redis cannot be reached, or cannot write; and not whether it does not want to."""
    if isinstance(error, AWAY):
        return True
    return str(error).startswith(CANNOT_WRITE)
