"""The fast way of a result: the device stores it, notifies its caller and ends its lease.

All results of a batch are stored in one step. Each result is written only while its job's lease is
held, so a worker that counts as dead changes nothing when it wakes up. Where results are on another
server than the leases, the one step becomes three. Jobs that are not plain are left to Celery's
tracer.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property, partial
from itertools import count
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from kombu.utils import json as kombu_json
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchery.cluster_backend import ClusterBackend
from batchery.cluster_client import find_tag, send_all
from batchery.protocol.headers import FIELD, PACKED, expires_s, stream_key
from batchery.redis_scripts import RedisScripts, cut_into_parts, find_server, get_database
from batchery.retry import is_away, pause_s
from batchery.task import BatchTask
from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.lease_store import LeaseStore
from batchery_worker.request import LeaseHandle
from batchery_worker.work import CommitContext, JobCommit

T = TypeVar("T")

#: Reads what became of each job of a part that was sent.
ReadStatuses = Callable[[], "Sequence[CommitStatus]"]

#: The scripts that write results. The head of each file names its keys, and who writes them.
LUA = Path(__file__).parent / "lua"

#: How often a command is sent to a Redis that can write, before the jobs are left to the tracer. A
#: lost connection explains the first failure, a failover the second.
MAX_TRIES = 3

#: Maximum pause between two attempts to reach a Redis that is away, in seconds.
MAX_COMMIT_PAUSE_S = 2.0


#: In the place of a database's number, for a cluster, which has none: there a message goes to all
#: nodes, and so only the fact is told that something is stored.
NO_DATABASE = ""


def result_scripts(client: "redis.Redis") -> RedisScripts:
    """The scripts that write results; most of them need a client of the backend's database."""
    return RedisScripts(client, LUA)


def spell_database(pool: Any) -> str:
    """The number of the database of a pool's connections, as scripts that write results take it."""
    return NO_DATABASE if "cluster" in pool.connection_kwargs else str(get_database(pool))


def store_states(
    scripts: RedisScripts,
    values: Mapping[Any, bytes | str],
    expires_s: int,
    lease: LeaseHandle | None = None,
) -> bytes:
    """Stores results, or states on the way to them; none over a SUCCESS.

    Args:
        scripts: On a client of the backend's database.
        values: By their keys, in a cluster of one shard.
        expires_s: When they expire; 0 for never.
        lease: Without it nothing is stored, if it is on the same server.

    Returns:
        A digit for each, see store.lua.
    """
    pool, keys, ours = scripts.pool, [*values], ("", "")
    database = spell_database(pool)
    if lease is not None and database != NO_DATABASE:
        leases = lease.store.client.connection_pool
        if find_server(leases) == find_server(pool):
            keys.append(lease.store.lease_key)
            ours = (str(lease.store.db), lease.token)
    args = (database, *ours, expires_s, *values.values())
    answer: bytes = scripts.run("store", keys, *args)
    return answer


def make_results_client(backend: Any) -> Any:
    """Makes a client of a result backend for Redis; the backend's own may wait for minutes."""
    given = backend.connparams
    # A connection by a Unix socket knows only one of them.
    limits = [name for name in ("socket_timeout", "socket_connect_timeout") if name in given]
    options = {"retry": Retry(NoBackoff(), 1), **dict.fromkeys(limits, SOCKET_TIMEOUT_S)}
    return backend._create_client(**{**given, **options})


class RetryingRedis:
    """Sends commands to one server, each until it is answered."""

    def __init__(
        self,
        connect: Callable[[], Any],
        on_wait: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not connect yet.

        Args:
            connect: Makes the client, or returns the one that there is.
            on_wait: Called when results must wait because the server is away.
            sleep: Waits for a number of seconds.
        """
        self._connect = connect
        self._on_wait = on_wait
        self._sleep = sleep
        self._client: Any = None
        self._scripts: RedisScripts | None = None

    @property
    def client(self) -> Any:
        """The client; made anew after each loss of the server."""
        if self._client is None:
            self._client = self._connect()
        return self._client

    @property
    def scripts(self) -> RedisScripts:
        """The scripts that write results, on this client."""
        if self._scripts is None:
            self._scripts = result_scripts(self.client)
        return self._scripts

    def attempt(
        self, command: Callable[["RetryingRedis"], T], lease_key: str | bytes
    ) -> tuple[T, int]:
        """Has a command obeyed, as `send` does, and waits for that."""
        return self.send(lambda server: partial(command, server), lease_key)()

    def send(
        self, command: Callable[["RetryingRedis"], Callable[[], T]], lease_key: str | bytes
    ) -> Callable[[], tuple[T, int]]:
        """Sends a command.

        Args:
            command: Sends it, and returns what reads the answer; it may be sent again although the
                server has obeyed already.
            lease_key: HASH of the worker's leases, for a write that changes nothing; in a cluster
                another key of the shard.

        Returns:
            Reads the answer, and the number of failed attempts before it; waits as long as the
            server is away. It raises `redis.RedisError` or `OSError` where the server can write,
            and still refuses.
        """
        read_answer = self._try(command)

        def read() -> tuple[T, int]:
            nonlocal read_answer
            for tries in count():
                try:
                    return read_answer(), tries
                except (redis.RedisError, OSError) as error:
                    self._await(lease_key, error)
                    if tries + 1 == MAX_TRIES:
                        raise
                    read_answer = self._try(command)
            raise AssertionError

        return read

    def _try(self, command: Callable[["RetryingRedis"], Callable[[], T]]) -> Callable[[], T]:
        """Sends a command; if that fails, whoever reads the answer hears of it."""
        try:
            return command(self)
        except (redis.RedisError, OSError) as error:
            return partial(_raise, error)

    def disconnect(self) -> None:
        """Closes the connections; the next command connects anew, maybe to another server."""
        client, scripts = self._client, self._scripts
        self._client = self._scripts = None
        if scripts is not None:
            scripts.release()
        if client is not None:
            # Others may share it.
            client.connection_pool.disconnect(inuse_connections=False)

    def _await(self, lease_key: str | bytes, error: Exception) -> None:
        """Waits until the server can write; returns at once if it can."""
        failures = 0
        while True:
            try:
                # It must be a write, because Redis may refuse only writes. There is no such field.
                self.client.hdel(lease_key, "")
            except (redis.RedisError, OSError) as still:
                if not is_away(still):
                    return
                error = still
            else:
                return
            failures += 1
            if failures == 1:
                logger.warning("results wait for Redis: %s", error)
                self._on_wait()
            # After a failover the address may belong to another server.
            self.disconnect()
            self._sleep(pause_s(failures, MAX_COMMIT_PAUSE_S))


def connect_results(
    backend: Any, on_wait: Callable[[], None], sleep: Callable[[float], None] = time.sleep
) -> Mapping[bytes, RetryingRedis]:
    """The servers of a result backend, by the tags of their keys: all shards of a cluster.

    Args:
        backend: Celery's. One server has keys without a tag, so its own is empty.
        on_wait: As for `RetryingRedis`.
        sleep: The same.
    """
    if not isinstance(backend, ClusterBackend):
        return {b"": RetryingRedis(partial(make_results_client, backend), on_wait, sleep)}
    shards: Mapping[bytes, Any] = make_results_client(backend).shards
    return {tag: RetryingRedis(partial(shards.__getitem__, tag), on_wait, sleep) for tag in shards}


class LeaseBroker(RetryingRedis):
    """The server of a store's leases, which is asked by itself where results are elsewhere."""

    def __init__(
        self, on_wait: Callable[[], None], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Does not connect yet; see `RetryingRedis`."""
        super().__init__(lambda: self._store.client, on_wait, sleep)
        #: That of the last question.
        self._store: Any = None

    def ask(self, script: str, store: LeaseStore, keys: Sequence[str], *args: str) -> bytes | None:
        """What a script answers; None where the broker does not know the store's worker."""
        if store is not self._store:
            self.disconnect()
            self._store = store
        answer: bytes | None
        answer, _ = self.attempt(
            lambda broker: broker.scripts.run_once(script, keys, *args), store.lease_key
        )
        return answer


#: Fields of every stored result. A stamp with such a name would overwrite the field, so a job with
#: such a stamp is left to Celery.
ALWAYS_STORED = frozenset(
    {"status", "result", "traceback", "children", "date_done", "task_id", "batch", *PACKED}
)


def only_celery_stores(app: Celery, task: BatchTask) -> str | None:
    """The reason why only Celery's backend can write the results of a task; None if we can."""
    backend: Any = task.backend
    # Completion threads have a subclass of the class that the app chose.
    chosen = getattr(backend, "stock_class", type(backend))
    clauses = (
        (backend is not app.backend, "a result backend of its own"),
        (
            chosen not in (RedisBackend, ClusterBackend),
            "a result backend other than Celery's for Redis",
        ),
        (backend.serializer != "json", "a result serializer other than JSON"),
        (getattr(backend, "compression", None), "compressed results"),
    )
    return next((reason for holds, reason in clauses if holds), None)


def stored_fields(
    message: Mapping[str, Any], *, ignores_result: bool, extended: bool
) -> Mapping[str, Any] | None:
    """The fields of the stored result that only some jobs have.

    Args:
        message: The headers of the job's message, with `args` and `kwargs` decoded.
        ignores_result: The task's setting, which counts if the message has none.
        extended: The setting `result_extended`.

    Returns:
        The fields; None if the job's result is not stored.
    """
    ignores = message.get("ignore_result")
    if ignores_result if ignores is None else ignores:
        return None
    fields = {}
    if message.get("group"):
        fields["group_id"] = message["group"]
    if message.get("parent_id"):
        fields["parent_id"] = message["parent_id"]
    if extended:
        fields.update(_extended_fields(message))
    return fields


def encode_fields(task_id: str, fields: Mapping[str, Any]) -> str:
    """The job's own part of a stored result, in JSON, without the braces around it.

    Raises:
        TypeError: JSON cannot write a field.
        ValueError: JSON cannot write a field either.
    """
    more = f"{kombu_json.dumps(fields)[1:-1]}, " if fields else ""
    return f'{more}"task_id": {encode_basestring_ascii(task_id)}'


def _extended_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "name": message.get("task"),
        "args": message.get("args"),
        "kwargs": message.get("kwargs"),
        "worker": message.get("hostname"),
        "retries": message.get("retries"),
        "queue": (message.get("delivery_info") or {}).get("routing_key"),
    }
    stamps = message.get("stamps")
    if stamps:
        headers = message.get("stamped_headers")
        fields["stamped_headers"] = headers
        fields.update((name, value) for name, value in stamps.items() if name in (headers or ()))
    return fields


logger = logging.getLogger("batchery.device")

#: Maximum number of jobs per call of the script, during which Redis serves nobody else.
MAX_JOBS_PER_SCRIPT = 512

#: Number of bytes after which no further result is added to a call, for the same reason.
MAX_BYTES_PER_SCRIPT = 4 << 20


#: Maximum number of entries of a completion stream, about.
MAX_ANNOUNCED = 4096

#: As JSON, without braces.
PACKED_FIELD = f"{json.dumps(PACKED)[1:-1]}, "


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

    def write(self, job: "JobResult", waited_ms: float, fields: Mapping[str, Any]) -> bytes:
        """Writes the stored result of one job.

        Args:
            job: What was computed for it: a result.
            waited_ms: How long it waited, from when it was sent.
            fields: Further fields, from `stored_fields`.
        """
        assert job.json is not None
        own, mark = encode_fields(job.task_id, fields), PACKED_FIELD if job.is_packed else ""
        text = f'{self._head}{waited_ms!r}}}, {own}, {mark}"result": '
        return b"%b%b}" % (text.encode(), job.json)


class CommitStatus(StrEnum):
    """What became of one job at the commit."""

    #: Redis has the result, the notification and the acknowledgement.
    COMMITTED = "committed"
    #: This worker has lost the lease; another worker has the job.
    FENCED = "fenced"
    #: Nobody wants its result any more; the main process revokes it.
    REVOKED = "revoked"
    #: Celery's tracer completes it, in the main process.
    NEEDS_TRACER = "needs tracer"


class JobResult(NamedTuple):
    """What a device has computed for a job."""

    task_id: str
    #: In UTF-8; None for what is no result, such as a failure.
    json: bytes | None
    #: Whether its vectors are packed.
    is_packed: bool = False


#: The statuses by their digits in commit.lua.
COMMIT_STATUSES = {
    ord("0"): CommitStatus.FENCED,
    ord("1"): CommitStatus.COMMITTED,
    ord("2"): CommitStatus.NEEDS_TRACER,
}


@dataclass(slots=True)
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
        on_wait: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's result backend for Redis, of the thread that commits.
            on_wait: Called when results must wait because Redis is away.
            sleep: Waits for a number of seconds.
        """
        self._backend = backend
        self._servers = connect_results(backend, on_wait, sleep)
        #: The only one of them; None for a cluster.
        self._results = self._servers.get(b"")
        #: By number of the shard of a store.
        self._brokers = defaultdict[int, LeaseBroker](lambda: LeaseBroker(on_wait, sleep))
        self._refusals: set[str] = set()
        #: Id of a worker that the backend's server does not know. A fenced worker gets another id.
        self._elsewhere = ""
        #: Id of a worker that the broker does not know either.
        self._unknown = ""

    def send(
        self, jobs: Sequence[JobResult], context: CommitContext, info: Mapping[str, Any]
    ) -> ReadStatuses:
        """Sends the results that it can store.

        Args:
            jobs: Those of one batch.
            context: The commit context of the batch.
            info: Facts of the batch, stored with each result.

        Returns:
            Reads one status per job, in order; waits as long as Redis is away. It must be called
            before the next batch is sent.
        """
        statuses = [CommitStatus.NEEDS_TRACER] * len(jobs)
        if context.store.worker == self._unknown:
            return lambda: statuses
        # Celery's own `now` reads settings, and so takes four times as long.
        writer = MetaWriter(datetime.now(self._backend.app.timezone).isoformat(), info)
        entries = [
            self._entry(index, job, context.jobs[index], writer) for index, job in enumerate(jobs)
        ]
        parts = cut_into_parts(
            [entry for entry in entries if entry is not None],
            lambda entry: len(entry.value),
            MAX_BYTES_PER_SCRIPT,
            MAX_JOBS_PER_SCRIPT,
        )
        first = next(parts, None)
        if first is None:
            return lambda: statuses
        # Nearly always the only one.
        sent = self._send_part(first, context)

        def read() -> Sequence[CommitStatus]:
            found = [(first, sent()), *((part, self._send_part(part, context)()) for part in parts)]
            for part, own in found:
                for entry, status in zip(part, own, strict=True):
                    statuses[entry.index] = status
            return statuses

        return read

    def _entry(
        self, index: int, job: JobResult, context: JobCommit, writer: MetaWriter
    ) -> _Entry | None:
        """Makes the script's entry for a job; None if the job needs the tracer."""
        if context is None or job.json is None:
            return None
        token, waited_ms, fields = context
        try:
            key = self._prefix + job.task_id.encode()
            value = b""
            if fields is not None:
                value = writer.write(job, waited_ms, fields)
        except (TypeError, ValueError, RecursionError):
            # For instance arguments that JSON cannot write. The tracer tells the caller.
            return None
        if len(value) > self._backend._MAX_STR_VALUE_SIZE:
            return None
        return _Entry(index, job.task_id, key, token, value)

    @cached_property
    def _prefix(self) -> bytes:
        return bytes(self._backend.get_key_for_task("-")[:-1])

    def _send_part(self, part: Sequence[_Entry], context: CommitContext) -> ReadStatuses:
        store, results = context.store, self._results
        read_answer = None
        if results is not None and store.worker != self._elsewhere:
            read_answer = self._store(results, part, context, store.db)

        def read() -> Sequence[CommitStatus]:
            try:
                if read_answer is not None:
                    answer, tries = read_answer()
                    if answer is not None:
                        statuses = [COMMIT_STATUSES[digit] for digit in answer]
                        return _recognise(part, statuses) if tries else statuses
                    self._elsewhere = store.worker
                return self._run_in_steps(part, context)
            except (redis.RedisError, OSError) as refusal:
                self._complain(refusal)
                return [CommitStatus.NEEDS_TRACER] * len(part)

        return read

    def _run_in_steps(
        self, part: Sequence[_Entry], context: CommitContext
    ) -> Sequence[CommitStatus]:
        """Commits where the leases are on another server; a job without a lease is not touched.

        The leases end last. If this process dies before that, the jobs run again, and what they
        answer then is not stored: a SUCCESS is never overwritten.
        """
        store = context.store
        keys = (store.keys.workers, store.lease_key)
        broker = self._brokers[store.shard]
        held = broker.ask("held", store, keys, store.worker, _tokens(part))
        if held is None:
            self._unknown = store.worker
            return [CommitStatus.NEEDS_TRACER] * len(part)
        statuses = {entry.index: CommitStatus.FENCED for entry in part}
        ours = [entry for entry, digit in zip(part, held, strict=True) if digit == ord("1")]
        if ours:
            if self._results is None:
                statuses.update(self._store_in_shards(ours, context))
            else:
                statuses.update(_read(ours, self._store(self._results, ours, context, None)))
            ended = [each for each in ours if statuses[each.index] is CommitStatus.COMMITTED]
            if self._results is None:
                self._announce(ended, context.completion_streams)
            if ended:
                broker.ask("end", store, keys[1:], _tokens(ended))
        return [statuses[entry.index] for entry in part]

    def _store_in_shards(
        self, ours: Sequence[_Entry], context: CommitContext
    ) -> Mapping[int, CommitStatus]:
        """Stores in all shards of a cluster at once; a status for each job, by its index."""
        shards = defaultdict[bytes, list[_Entry]](list)
        for entry in ours:
            entry.key = self._backend.get_key_for_task(entry.task_id)
            shards[find_tag(entry.key)].append(entry)
        sent = [
            (part, self._store(self._servers[tag], part, context, None, tag))
            for tag, part in shards.items()
        ]
        statuses = dict[int, CommitStatus]()
        for part, read_answer in sent:
            try:
                statuses.update(_read(part, read_answer))
            except (redis.RedisError, OSError) as refusal:
                self._complain(refusal)
                statuses.update((each.index, CommitStatus.NEEDS_TRACER) for each in part)
        return statuses

    def _announce(
        self, stored: Sequence[_Entry], completion_streams: Mapping[str, Sequence[int]]
    ) -> None:
        """Announces results in a cluster, where each completion stream has a shard of its own."""
        ids = {entry.index: entry.task_id for entry in stored}
        commands = []
        for name, indexes in completion_streams.items():
            if done := [ids[index] for index in indexes if index in ids]:
                entry = ("NOMKSTREAM", "MAXLEN", "~", MAX_ANNOUNCED, "*", FIELD, json.dumps(done))
                commands.append(("XADD", stream_key(self._backend, name), *entry))
        if commands:
            with suppress(redis.RedisError, OSError):  # Producers also look for results.
                send_all(self._announcer, commands)

    @cached_property
    def _announcer(self) -> Any:
        return make_results_client(self._backend)

    def _store(
        self,
        results: RetryingRedis,
        part: Sequence[_Entry],
        context: CommitContext,
        broker_db: int | None,
        tag: bytes = b"",
    ) -> Callable[[], tuple[bytes | None, int]]:
        """Sends the script.

        Args:
            results: The server that stores.
            part: What it stores.
            context: The commit context of the batch.
            broker_db: Number of the broker's database; None if that is on another server.
            tag: Of the shard, in a cluster.

        Returns:
            Reads its answer, and the number of failed tries before it.
        """
        app_s, keep_s = self._backend.expires, context.keep_s
        # Once if that is the same for all.
        given = [keep_s.get(entry.index) for entry in part] if keep_s else [None]
        expiries = " ".join(str(expires_s(app_s, each)) for each in given)
        leases = context.store
        # A shard refuses keys of others, and needs none of the leases'.
        workers, lease_key = (tag, tag) if tag else (leases.keys.workers, leases.lease_key)
        completion_streams = {} if tag else context.completion_streams
        keys: list[Any] = [workers, lease_key, *(entry.key for entry in part)]
        args: list[Any] = [
            leases.worker,
            spell_database(results.client.connection_pool),
            "" if broker_db is None else broker_db,
            expiries,
            len(completion_streams),
            _tokens(part),
            *(entry.value for entry in part),
        ]
        if completion_streams:
            self._add_completion_streams(keys, args, part, completion_streams)
        return results.send(lambda server: server.scripts.send("commit", keys, *args), lease_key)

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


def _raise(error: Exception) -> NoReturn:
    raise error


def _read(
    part: Sequence[_Entry], read_answer: Callable[[], tuple[bytes | None, int]]
) -> Mapping[int, CommitStatus]:
    """The status of each job that was stored without its lease, by its index."""
    answer, _ = read_answer()
    assert answer is not None
    return {entry.index: COMMIT_STATUSES[digit] for entry, digit in zip(part, answer, strict=True)}


def _tokens(entries: Iterable[_Entry]) -> str:
    """The tokens of jobs, as the scripts take them."""
    return " ".join(entry.token for entry in entries)


def _recognise(part: Sequence[_Entry], statuses: Sequence[CommitStatus]) -> list[CommitStatus]:
    """Counts jobs as committed whose lease an earlier try has ended, and its answer was lost.

    The script recognises such a job by its stored result, and cannot if there is none. If another
    worker has the job after all, it runs there once more, and stores nothing there either.
    """
    return [
        CommitStatus.COMMITTED if status is CommitStatus.FENCED and not entry.value else status
        for entry, status in zip(part, statuses, strict=True)
    ]
