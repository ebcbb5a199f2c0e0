"""Collecting: results are awaited without a subscription for each job.

On Redis, each client has a reply stream. Batchery's workers announce the jobs that they committed
on it, and the collector fetches many results at a time. Polling the jobs in flight finds all
others: results of stock workers, those that Celery's tracer stored (failures, for instance), and
lost announcements. How often it polls depends on how much it finds: see `PollingInterval`.

On other backends, the collector polls each job by Celery's own `AsyncResult`.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from celery import Celery, uuid
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult
from celery.utils.functional import chunks
from kombu.exceptions import KombuError
from kombu.utils import json

from batchery.errors import SettingsError
from batchery.protocol.completion_stream import FIELD, read_ids, stream_key
from batchery.protocol.headers import HEADER, VERSION
from batchery_producer.results.answers import Answer, BatchSummary, read_answer
from batchery_producer.results.polling import Collector
from batchery_producer.retry import RetryPolicy

#: Number of results that one command fetches.
CHUNK = 256

#: Number of entries of the reply stream that are read at a time; a worker writes one for each
#: batch.
ENTRIES = 32

#: With so many jobs in flight, the collector waits so long, in seconds, to fetch several results at
#: once.
GATHER_JOBS = 1000
GATHER_S = 0.005

#: How long an unread reply stream is kept, in seconds.
REPLY_S = 3600

#: Minimum wait for the reply stream, in seconds: to Redis, 0 means for ever.
MIN_WAIT_S = 0.001

#: Matches the facts of the batch in the stored fields before the value. They are parsed for each
#: job, and this takes half of the time of a parser.
BATCH = re.compile(
    rb'"batch": \{"id": "(\w+)", "size": (\d+),[^}]*"forward_ms": ([0-9.e-]+), "device": "([^"]*)"'
)


def collector_for(app: Celery, retries: RetryPolicy, *, forgets_dropped: bool = False) -> Collector:
    """Picks the collector for the app's result backend.

    Args:
        app: The app to which jobs are sent.
        retries: How long it waits for a backend that is away.
        forgets_dropped: Whether it removes results that are announced and not awaited any more.

    Raises:
        SettingsError: The app has no result backend.
    """
    if isinstance(app.backend, DisabledBackend):
        raise SettingsError(
            f"app {app.main!r} has no result backend; set result_backend to a Redis URL"
        )
    if isinstance(app.backend, RedisBackend):
        return RedisCollector(app.backend, retries, forgets_dropped=forgets_dropped)
    return AnyCollector(app, retries)


class RedisCollector(Collector):
    """Reads a reply stream of its own, and fetches many results in one command."""

    def __init__(
        self, backend: Any, retries: RetryPolicy, *, forgets_dropped: bool = False
    ) -> None:
        super().__init__()
        self._backend: Any = backend
        self._forgets_dropped = forgets_dropped
        self._retries = retries
        timeout_s = retries.shorten(backend.connparams.get("socket_timeout"))
        #: One of our own where the backend's would wait for longer than the caller.
        self._client: Any = backend.client
        if retries.command_s is not None:
            # A Unix socket has no timeout for connecting.
            names = {"socket_timeout", "socket_connect_timeout"} & set(backend.connparams)
            limits = dict.fromkeys(names, timeout_s)
            self._client = backend._create_client(**{**backend.connparams, **limits})
        self._errors: tuple[type[BaseException], ...] = (
            *self._backend.connection_errors,
            redis.exceptions.ReadOnlyError,
        )
        #: Name of the reply stream, in the headers of jobs.
        self._name = uuid()
        self._key = stream_key(backend, self._name)
        self._last = b"0"
        self._is_made = False
        self._is_plain = type(backend) is RedisBackend and self._backend.serializer == "json"
        self._longest_wait_s = timeout_s / 2 if timeout_s else float("inf")

    @property
    def headers(self) -> Mapping[str, Any]:
        """As `Collector.headers`."""
        return {HEADER: {"v": VERSION, "reply": self._name}}

    def expect(self, task_ids: Iterable[str]) -> None:
        """As `Collector.expect`; raises what a `RetryPolicy` raises."""
        if not self._is_made:
            self._call(self._make_reply)
        super().expect(task_ids)

    def _make_reply(self) -> None:
        # Workers write only to an existing stream, so none is left once it is removed.
        self._is_made = True
        with suppress(redis.exceptions.OutOfMemoryError), self._client.pipeline() as pipe:
            pipe.xadd(self._key, {FIELD: b"[]"}, maxlen=1)
            pipe.expire(self._key, REPLY_S)
            pipe.execute()

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `RetryPolicy` raises."""
        for chunk in chunks(iter(task_ids), CHUNK):
            self._call(partial(self._client.unlink, *self._keys(chunk)))

    def close(self) -> None:
        """As `Collector.close`."""
        with suppress(Exception):  # It expires.
            if not self._retries.is_spent:
                self._client.unlink(self._key)
            self._client.connection_pool.disconnect(inuse_connections=False)

    def _announcements(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        if wait_s and len(self._awaited) >= GATHER_JOBS:
            # Each read costs a round trip, so let several announcements arrive.
            time.sleep(min(wait_s, GATHER_S))
        ids: list[str] = []
        for entry_id, entry in self._call(partial(self._read, min(wait_s, self._longest_wait_s))):
            self._last = entry_id
            ids += read_ids(entry)
        if self._forgets_dropped:
            self.forget([each for each in ids if each not in self._awaited])
        yield from self._ended([each for each in ids if each in self._awaited])

    def _read(self, wait_s: float) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Reads the next entries, and removes those of earlier reads; safe to repeat."""
        block_ms = int(max(wait_s, MIN_WAIT_S) * 1000) if wait_s else None
        with self._client.pipeline(transaction=False) as pipe:
            if self._last != b"0":
                pipe.xtrim(self._key, minid=_after(self._last), approximate=False)
            pipe.expire(self._key, REPLY_S)
            pipe.xread({self._key: self._last}, count=ENTRIES, block=block_ms)
            *_, is_there, answer = pipe.execute()
        if not is_there:
            # The stream expired, or Redis lost its data.
            self._make_reply()
        return _entries(answer)

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for chunk in chunks(iter(task_ids), CHUNK):
            values = self._call(partial(self._client.mget, self._keys(chunk)))
            for task_id, value in zip(chunk, values, strict=True):
                if value is not None and (answer := self._answer(task_id, value)):
                    yield task_id, answer

    def _call(self, function: Any) -> Any:
        return self._retries.call(function, self._errors)

    def _keys(self, task_ids: Sequence[str]) -> list[Any]:
        return [self._backend.get_key_for_task(task_id) for task_id in task_ids]

    def _answer(self, task_id: str, payload: bytes) -> Answer | None:
        if stored := self._split_at_value(task_id, payload):
            info, value = stored
            with suppress(ValueError, RecursionError):
                return Answer(value=json.loads(value), batch=_batch_in(info))
        try:
            meta = self._backend.decode(payload)
        except (KombuError, ValueError, RecursionError) as error:
            return Answer(error=(type(error).__name__, f"a result that cannot be read: {error}"))
        return read_answer(meta.get("status"), meta.get("result"), meta.get("batch"))

    def _split_at_value(self, task_id: str, payload: bytes) -> tuple[bytes, bytes] | None:
        """The text before the value, and the value, if a worker of ours stored the result.

        Our workers store the value last, after the id. Parsing it alone takes a third of the time.
        """
        if not self._is_plain or not payload.startswith(b'{"status": "SUCCESS", "traceback"'):
            return None
        info, id_, value = payload.partition(b'"task_id": "%b", "result": ' % task_id.encode())
        return (info, value[:-1]) if id_ else None


class AnyCollector(Collector):
    """Polls any backend of Celery's, one result at a time."""

    def __init__(self, app: Celery, retries: RetryPolicy) -> None:
        super().__init__()
        self._app = app
        self._retries = retries
        # Not every backend names its connection errors.
        self._errors: tuple[type[BaseException], ...] = (
            *getattr(app.backend, "connection_errors", ()),
            ConnectionError,
        )

    @property
    def headers(self) -> Mapping[str, Any]:
        """As `Collector.headers`: none."""
        return {}

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `RetryPolicy` raises."""
        for task_id in task_ids:
            self._retries.call(partial(self._forget, task_id), self._errors)

    def close(self) -> None:
        """As `Collector.close`."""

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for task_id in task_ids:
            if answer := self._retries.call(partial(self._ask, task_id), self._errors):
                yield task_id, answer

    def _ask(self, task_id: str) -> Answer | None:
        result: AsyncResult[Any] = AsyncResult(task_id, app=self._app)
        # Celery caches the result of a ready job, so this is one request.
        return read_answer(result.state, result.result) if result.ready() else None

    def _forget(self, task_id: str) -> None:
        # The RPC backend cannot forget: reading a result has removed it.
        with suppress(NotImplementedError):
            AsyncResult(task_id, app=self._app).forget()


def _batch_in(info: bytes) -> BatchSummary | None:
    """The batch in the stored fields before the value."""
    found = BATCH.search(info)
    if found is None:
        return None
    return BatchSummary(found[1].decode(), int(found[2]), float(found[3]), found[4].decode())


def _after(entry_id: bytes) -> str:
    """The next id of the stream."""
    time_ms, _, number = entry_id.decode().partition("-")
    return f"{time_ms}-{int(number) + 1}"


def _entries(answer: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries of one stream: a mapping of lists in RESP3, a list of pairs in RESP2."""
    if not answer:
        return []
    (found,) = answer.values() if isinstance(answer, dict) else [pair[1] for pair in answer]
    # RESP3 has one more list around them.
    return list(found[0] if isinstance(answer, dict) and found else found)
