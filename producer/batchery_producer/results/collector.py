"""Collecting: how results are awaited, without a subscription for each job.

On Redis, Batchery's workers announce what they have committed on one stream per run, its reply, and
the results are fetched many at a time. Everything else is found by sweeps over the jobs in flight:
results of stock workers, those that Celery's tracer stored (failures, for instance), and what was
announced while nobody could hear it. How often depends on how much they find: see `Pace`.

On other backends, each job in flight is asked for by Celery's own `AsyncResult`.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Protocol

import redis
from celery import Celery, uuid
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult
from kombu.exceptions import KombuError
from kombu.utils import json

from batchery.errors import SettingsError
from batchery.protocol.completion_stream import FIELD, ids_of, stream_key
from batchery.protocol.multi_item import HEADER, VERSION
from batchery_producer.results.answers import Answer, answer_of
from batchery_producer.results.polling import Sweeping
from batchery_producer.retry import Patience

#: Results that are asked for, and held in memory, at a time.
CHUNK = 256

#: Entries of the reply that are read at a time; a worker writes one for each batch.
ENTRIES = 32

#: With so many jobs in flight, a result may wait so long for others, in seconds.
GATHER_JOBS = 1000
GATHER_S = 0.005

#: How long a reply is kept that nobody reads, in seconds.
REPLY_S = 3600

#: Shortest wait for the reply, in seconds; Redis takes 0 for ever.
SHORTEST_WAIT_S = 0.001


#: Of what is stored before the value: how many items shared the batch.
BATCH_SIZE = re.compile(rb'"batch": \{"id": "\w+", "size": (\d+)')


class Collector(Protocol):
    """Awaits jobs. For one thread, but `expect` and `drop` may be called from others."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers that the messages of the jobs must have."""

    def expect(self, task_ids: Iterable[str]) -> None:
        """Adds jobs to those that are awaited, before they are sent."""

    def drop(self, task_ids: Iterable[str]) -> None:
        """Awaits these no more."""

    def collect(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        """Yields jobs that have ended, each once; not always all of them.

        Args:
            wait_s: How long to wait for the first one, in seconds.

        Raises:
            Interrupted: The patience was asked to stop.
            GaveUp: The backend stays away.
        """

    def sweep(self) -> Iterator[tuple[str, Answer]]:
        """Yields the jobs that have ended by now, as far as their results are stored."""

    def forget(self, task_ids: Sequence[str]) -> None:
        """Removes results from the backend."""

    def close(self) -> None:
        """Leaves nothing behind but results."""


def collector_for(app: Celery, patience: Patience) -> Collector:
    """Picks the collector that knows the app's result backend best.

    Raises:
        SettingsError: The app has no result backend.
    """
    if isinstance(app.backend, DisabledBackend):
        raise SettingsError(
            f"app {app.main!r} has no result backend; set result_backend to a Redis URL"
        )
    if isinstance(app.backend, RedisBackend):
        return RedisCollector(app.backend, patience)
    return AnyCollector(app, patience)


class RedisCollector(Sweeping):
    """Hears of jobs on a reply of its own, and asks Redis for many results in one command."""

    def __init__(self, backend: Any, patience: Patience) -> None:
        super().__init__()
        self._backend: Any = backend
        self._patience = patience
        self._errors: tuple[type[BaseException], ...] = (
            *self._backend.connection_errors,
            redis.exceptions.ReadOnlyError,
        )
        #: What is awaited is announced under this name.
        self._name = uuid()
        self._key = stream_key(backend, self._name)
        self._last = b"0"
        self._is_made = False
        self._is_plain = type(backend) is RedisBackend and self._backend.serializer == "json"
        timeout_s = self._backend.connparams.get("socket_timeout")
        self._longest_wait_s = timeout_s / 2 if timeout_s else float("inf")

    @property
    def headers(self) -> Mapping[str, Any]:
        """As `Collector.headers`."""
        return {HEADER: {"v": VERSION, "reply": self._name}}

    def expect(self, task_ids: Iterable[str]) -> None:
        """As `Collector.expect`; raises what a `Patience` raises."""
        if not self._is_made:
            self._call(self._make_reply)
        super().expect(task_ids)

    def _make_reply(self) -> None:
        # Workers write only to what is there: so nothing is there once it is removed.
        self._is_made = True
        with suppress(redis.exceptions.OutOfMemoryError), self._backend.client.pipeline() as pipe:
            pipe.xadd(self._key, {FIELD: b"[]"}, maxlen=1)
            pipe.expire(self._key, REPLY_S)
            pipe.execute()

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `Patience` raises."""
        for chunk in _chunks(task_ids):
            self._call(partial(self._backend.client.unlink, *self._keys(chunk)))

    def close(self) -> None:
        """As `Collector.close`."""
        with suppress(Exception):  # It expires.
            self._backend.client.unlink(self._key)
            self._backend.client.connection_pool.disconnect(inuse_connections=False)

    def _announcements(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        if wait_s and len(self._awaited) >= GATHER_JOBS:
            # Each look costs a round trip: let there be something to see.
            time.sleep(min(wait_s, GATHER_S))
        ids: list[str] = []
        for entry_id, entry in self._call(partial(self._read, min(wait_s, self._longest_wait_s))):
            self._last = entry_id
            ids += ids_of(entry)
        yield from self._ended([each for each in ids if each in self._awaited])

    def _read(self, wait_s: float) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Reads on; what was read before goes, so that asking again does no harm."""
        block_ms = int(max(wait_s, SHORTEST_WAIT_S) * 1000) if wait_s else None
        with self._backend.client.pipeline(transaction=False) as pipe:
            if self._last != b"0":
                pipe.xtrim(self._key, minid=_after(self._last), approximate=False)
            pipe.expire(self._key, REPLY_S)
            pipe.xread({self._key: self._last}, count=ENTRIES, block=block_ms)
            *_, is_there, answer = pipe.execute()
        if not is_there:
            # It has expired, or Redis has lost its data.
            self._make_reply()
        return _entries(answer)

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for chunk in _chunks(task_ids):
            values = self._call(partial(self._backend.client.mget, self._keys(chunk)))
            for task_id, value in zip(chunk, values, strict=True):
                if value is not None and (answer := self._answer(task_id, value)):
                    yield task_id, answer

    def _call(self, function: Any) -> Any:
        return self._patience.call(function, self._errors)

    def _keys(self, task_ids: Sequence[str]) -> list[Any]:
        return [self._backend.get_key_for_task(task_id) for task_id in task_ids]

    def _answer(self, task_id: str, payload: bytes) -> Answer | None:
        if stored := self._halves(task_id, payload):
            facts, value = stored
            size = BATCH_SIZE.search(facts)
            with suppress(ValueError, RecursionError):
                return Answer(value=json.loads(value), batch_size=int(size[1]) if size else 0)
        try:
            meta = self._backend.decode(payload)
        except (KombuError, ValueError, RecursionError) as error:
            return Answer(error=(type(error).__name__, f"a result that cannot be read: {error}"))
        return answer_of(meta.get("status"), meta.get("result"), meta.get("batch"))

    def _halves(self, task_id: str, payload: bytes) -> tuple[bytes, bytes] | None:
        """What is before the value, and the value, where a worker of ours has stored it.

        It comes last, after the id. To read only that takes a third of the time.
        """
        if not self._is_plain or not payload.startswith(b'{"status": "SUCCESS", "traceback"'):
            return None
        facts, id_, value = payload.partition(b'"task_id": "%b", "result": ' % task_id.encode())
        return (facts, value[:-1]) if id_ else None


class AnyCollector(Sweeping):
    """Asks any backend that Celery has, for one result at a time."""

    def __init__(self, app: Celery, patience: Patience) -> None:
        super().__init__()
        self._app = app
        self._patience = patience
        # Not every backend says what a lost connection looks like.
        self._errors: tuple[type[BaseException], ...] = (
            *getattr(app.backend, "connection_errors", ()),
            ConnectionError,
        )

    @property
    def headers(self) -> Mapping[str, Any]:
        """As `Collector.headers`: none."""
        return {}

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `Patience` raises."""
        for task_id in task_ids:
            self._patience.call(partial(self._forget, task_id), self._errors)

    def close(self) -> None:
        """As `Collector.close`."""

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for task_id in task_ids:
            if answer := self._patience.call(partial(self._ask, task_id), self._errors):
                yield task_id, answer

    def _ask(self, task_id: str) -> Answer | None:
        result: AsyncResult[Any] = AsyncResult(task_id, app=self._app)
        # Ready jobs are cached with their result: it is one request for both.
        return answer_of(result.state, result.result) if result.ready() else None

    def _forget(self, task_id: str) -> None:
        # RPC forgets nothing: there, a result that was read is gone already.
        with suppress(NotImplementedError):
            AsyncResult(task_id, app=self._app).forget()


def _after(entry_id: bytes) -> str:
    """The id after this one."""
    time_ms, _, number = entry_id.decode().partition("-")
    return f"{time_ms}-{int(number) + 1}"


def _entries(answer: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries of one stream: RESP3 gives a mapping of lists, RESP2 a list of pairs."""
    if not answer:
        return []
    (found,) = answer.values() if isinstance(answer, dict) else [pair[1] for pair in answer]
    # RESP3's has one list more around them.
    return list(found[0] if isinstance(answer, dict) and found else found)


def _chunks(task_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    ids = iter(task_ids)
    while chunk := list(islice(ids, CHUNK)):
        yield chunk
