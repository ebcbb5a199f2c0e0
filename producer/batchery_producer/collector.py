"""Collecting: results are awaited without a subscription for each job.

On Redis, each client has a reply stream. Batchery's workers announce the jobs that they committed
on it, and the collector fetches many results at a time. Polling the jobs in flight finds all
others, oldest first: results of stock workers, those that Celery's tracer stored (failures, for
instance), and lost announcements. How often it polls depends on how much it finds: see
`PollingInterval`.

On other backends, each job in flight is polled by Celery's own `AsyncResult`.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from celery import Celery, uuid
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.utils.functional import chunks
from kombu.exceptions import KombuError
from kombu.utils import json

from batchery.errors import SettingsError
from batchery.protocol.headers import FIELD, HEADER, VERSION, read_ids, stream_key
from batchery.retry import REFUSALS, RetryPolicy
from batchery_producer.answers import Answer, BatchSummary, read_answer

#: Limits of the interval between two polls, in seconds: the delay of a single job's result, and how
#: often a display has something new to show.
MIN_INTERVAL_S = 0.002
MAX_INTERVAL_S = 0.25

#: Part of the jobs that a poll asks for that should have ended. A smaller part costs more polls per
#: result; a larger one lets the queue run empty before the window is filled again.
SHARE_PER_POLL = 1 / 8

#: Minimum ratio of the interval to the duration of the poll, if workers announce results: polls
#: then find only the few results that are not announced.
REST_PER_POLL = 9.0

#: Maximum interval that follows from the duration of a poll, in seconds. The duration includes the
#: caller's work on the results.
MAX_REST_S = 2.0

#: Number of jobs that one poll asks for; the next poll continues there.
POLL_JOBS = 4096

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


class PollingInterval:
    """How long to wait between two polls, to find many results and yet find them soon. Pure."""

    def __init__(self) -> None:
        self._interval_s = MIN_INTERVAL_S

    def next_s(self, *, asked: int, found: int, announced: int, poll_s: float) -> float:
        """How long to wait after a poll, in seconds; not at all if every job had ended.

        Args:
            asked: Number of jobs that the poll asked for.
            found: Number of results that it found.
            announced: Number of results that were announced since the previous poll.
            poll_s: Duration of this poll, in seconds; polling takes half of the time or less.
        """
        if asked and found == asked:
            return 0.0
        if found > asked * SHARE_PER_POLL:
            self._interval_s /= 2
        else:
            self._interval_s = MAX_INTERVAL_S if announced else self._interval_s * 1.5
        self._interval_s = min(max(self._interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        is_announced = announced and announced >= found
        rest_s = min(poll_s * (REST_PER_POLL if is_announced else 1.0), MAX_REST_S)
        return max(self._interval_s, rest_s)


class Collector(ABC):
    """Awaits jobs. For use by one thread, but others may call `expect` and `drop`.

    A subclass asks the backend, and may receive announcements.

    Attributes:
        headers: Headers that the jobs' messages must have.
        retries: How long it waits for a backend that is away.
    """

    def __init__(self, retries: RetryPolicy, errors: Iterable[type[BaseException]]) -> None:
        self.headers: Mapping[str, Any] = {}
        self.retries = retries
        self._errors = tuple(errors)
        #: Oldest first.
        self._awaited: dict[str, None] = {}
        self._interval = PollingInterval()
        self._poll_at_s = time.monotonic()
        self._announced = 0
        #: Those that the next polls ask for, oldest last.
        self._left: list[str] = []

    @property
    def awaited(self) -> KeysView[str]:
        """The jobs that have not ended, oldest first."""
        return self._awaited.keys()

    def expect(self, task_ids: Iterable[str]) -> None:
        """Awaits jobs; to be called before they are sent. Raises what a `RetryPolicy` raises."""
        self._awaited.update(dict.fromkeys(task_ids))

    def drop(self, task_ids: Iterable[str]) -> None:
        """Stops awaiting jobs."""
        for task_id in task_ids:
            self._awaited.pop(task_id, None)

    def collect(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        """Yields jobs that have ended, each once, but not always all of them.

        Args:
            wait_s: How long to wait for the first one, in seconds.

        Raises:
            Interrupted: The caller asked to stop.
            GaveUp: The backend stays away.
        """
        began_s = time.monotonic()
        if self._awaited and began_s >= self._poll_at_s:
            found, polled = 0, self._next_polled()
            for ended in self._ended(polled):
                found += 1
                yield ended
            now_s = time.monotonic()
            self._poll_at_s = now_s + self._interval.next_s(
                asked=len(polled),
                found=found,
                announced=self._announced,
                poll_s=now_s - began_s,
            )
            self._announced = 0
            if found:
                wait_s = 0
        left_s = self._poll_at_s - time.monotonic() if self._awaited else wait_s
        for ended in self._announcements(max(0.0, min(wait_s, left_s))):
            self._announced += 1
            yield ended

    def poll_all(self) -> Iterator[tuple[str, Answer]]:
        """Yields all jobs whose results are stored by now."""
        yield from self._ended(list(self._awaited))

    @abstractmethod
    def forget(self, task_ids: Sequence[str]) -> None:
        """Removes results from the backend; raises what a `RetryPolicy` raises."""

    @abstractmethod
    def close(self) -> None:
        """Removes everything but results; `expect` makes it anew."""

    def _next_polled(self) -> list[str]:
        if not self._left:
            # Reversed, as jobs are taken from the end and the oldest must come first.
            self._left = list(self._awaited)[::-1]
        some = [self._left.pop() for _ in range(min(POLL_JOBS, len(self._left)))]
        return [task_id for task_id in some if task_id in self._awaited]

    def _ended(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for task_id, answer in self._answers(task_ids):
            if task_id in self._awaited:
                self._awaited.pop(task_id, None)
                yield task_id, answer

    def _call(self, function: Any) -> Any:
        return self.retries.call(function, self._errors)

    @abstractmethod
    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        """How those of these jobs ended that have."""

    def _announcements(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        time.sleep(wait_s)
        return iter(())


class RedisCollector(Collector):
    """Reads a reply stream of its own, and fetches many results in one command."""

    def __init__(
        self, backend: Any, retries: RetryPolicy, *, forgets_dropped: bool = False
    ) -> None:
        super().__init__(retries, (*backend.connection_errors, *REFUSALS))
        self._backend: Any = backend
        self._forgets_dropped = forgets_dropped
        timeout_s = retries.shorten(backend.connparams.get("socket_timeout"))
        #: One of our own where the backend's would wait for longer than the caller.
        self._client = backend.client
        if retries.command_s is not None:
            # A Unix socket has no timeout for connecting.
            names = {"socket_timeout", "socket_connect_timeout"} & set(backend.connparams)
            limits = dict.fromkeys(names, timeout_s)
            self._client = backend._create_client(**{**backend.connparams, **limits})
        self._longest_wait_s = timeout_s / 2 if timeout_s else float("inf")
        self._is_plain = type(backend) is RedisBackend and self._backend.serializer == "json"
        name = uuid()
        self.headers = {HEADER: {"v": VERSION, "reply": name}}
        self._key = stream_key(backend, name)
        self._is_made = False
        #: Id of the last entry that was read.
        self._last = b"0"

    def expect(self, task_ids: Iterable[str]) -> None:
        """As `Collector.expect`."""
        if not self._is_made:
            self._call(self._make_reply)
        super().expect(task_ids)

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`."""
        for chunk in chunks(iter(task_ids), CHUNK):
            self._call(partial(self._client.unlink, *self._keys(chunk)))

    def close(self) -> None:
        """As `Collector.close`."""
        self._is_made = False
        with suppress(Exception):  # It expires.
            if not self.retries.is_spent:
                self._client.unlink(self._key)
            self._client.connection_pool.disconnect(inuse_connections=False)

    def _make_reply(self) -> None:
        # Workers write only to an existing stream, so none is left once it is removed.
        self._is_made = True
        with suppress(redis.exceptions.OutOfMemoryError), self._client.pipeline() as pipe:
            pipe.xadd(self._key, {FIELD: b"[]"}, maxlen=1)
            pipe.expire(self._key, REPLY_S)
            pipe.execute()

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
                time_ms, _, number = self._last.decode().partition("-")
                pipe.xtrim(self._key, minid=f"{time_ms}-{int(number) + 1}", approximate=False)
            pipe.expire(self._key, REPLY_S)
            pipe.xread({self._key: self._last}, count=ENTRIES, block=block_ms)
            *_, is_there, answer = pipe.execute()
        if not is_there:
            # The stream expired, or Redis lost its data.
            self._make_reply()
        return [entry for found in entries_by_key(answer).values() for entry in found]

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for chunk in chunks(iter(task_ids), CHUNK):
            values = self._call(partial(self._client.mget, self._keys(chunk)))
            for task_id, value in zip(chunk, values, strict=True):
                if value is not None and (answer := self._answer(task_id, value)):
                    yield task_id, answer

    def _keys(self, task_ids: Sequence[str]) -> list[Any]:
        return [self._backend.get_key_for_task(task_id) for task_id in task_ids]

    def _answer(self, task_id: str, payload: bytes) -> Answer | None:
        # Our workers store the value last, after the id: to parse it alone takes a third as long.
        if self._is_plain and payload.startswith(b'{"status": "SUCCESS", "traceback"'):
            info, id_, value = payload.partition(b'"task_id": "%b", "result": ' % task_id.encode())
            with suppress(ValueError, RecursionError):
                if id_:
                    return Answer(value=json.loads(value[:-1]), batch=_batch_in(info))
        return read_stored(self._backend, payload)


class AnyCollector(Collector):
    """Polls any other backend of Celery's, one result at a time."""

    def __init__(self, app: Celery, retries: RetryPolicy) -> None:
        # Not every backend names its connection errors.
        super().__init__(retries, (*getattr(app.backend, "connection_errors", ()), ConnectionError))
        self._app = app

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`."""
        for task_id in task_ids:
            # The RPC backend cannot forget: reading a result has removed it.
            with suppress(NotImplementedError):
                self._call(self._app.AsyncResult(task_id).forget)

    def close(self) -> None:
        """As `Collector.close`."""

    def _answers(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        for task_id in task_ids:
            if answer := self._call(partial(self._ask, task_id)):
                yield task_id, answer

    def _ask(self, task_id: str) -> Answer | None:
        result = self._app.AsyncResult(task_id)
        # Celery caches the result of a ready job, so this is one request.
        return read_answer(result.state, result.result) if result.ready() else None


def collector_for(app: Celery, retries: RetryPolicy, *, forgets_dropped: bool = False) -> Collector:
    """The collector of an app's results.

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


def read_stored(backend: Any, payload: bytes) -> Answer | None:
    """Reads what a backend has stored; None while the job has not ended, an error if it is odd."""
    try:
        meta = backend.decode(payload)
        return read_answer(meta.get("status"), meta.get("result"), meta.get("batch"))
    except (KombuError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return Answer(error=(type(error).__name__, f"a result that cannot be read: {error}"))


def _batch_in(info: bytes) -> BatchSummary | None:
    """The batch in the stored fields before the value."""
    if found := BATCH.search(info):
        return BatchSummary(found[1].decode(), int(found[2]), float(found[3]), found[4].decode())
    return None


def entries_by_key(answer: Any) -> dict[bytes, list[tuple[bytes, Mapping[bytes, bytes]]]]:
    """The entries that an XREAD brings: a mapping of lists in RESP3, a list of pairs in RESP2."""
    if isinstance(answer, dict):
        # RESP3 has one more list around them.
        return {key: list(found[0] if found else ()) for key, found in answer.items()}
    return {key: list(found) for key, found in answer or ()}
