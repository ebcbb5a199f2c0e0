"""Collecting: results are awaited without a subscription for each job.

Each client has a reply stream. Batchery's workers announce the jobs that they committed on it, and
the collector fetches many results at a time. Polling the jobs in flight finds all others, oldest
first: results of stock workers, those that Celery's tracer stored (failures, for instance), and
lost announcements.
"""

import time
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from celery import Celery, uuid
from celery.backends.redis import RedisBackend, SentinelBackend
from celery.utils.functional import chunks
from kombu.exceptions import KombuError

from batchery.cluster_backend import ClusterBackend
from batchery.errors import SettingsError
from batchery.protocol.headers import (
    FIELD,
    HEADER,
    PACKED,
    VERSION,
    is_packed,
    read_ids,
    stream_key,
)
from batchery.retry import REFUSALS, RetryPolicy
from batchery.transport.codec import read_json
from batchery_producer.answers import Answer, read_answer

#: Limits of the interval between two polls, in seconds: the delay of a single job's result that is
#: not announced, and how often a display has something new to show.
MIN_INTERVAL_S = 0.002
MAX_INTERVAL_S = 0.25

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

#: Backends that decode as Celery does.
PLAIN_BACKENDS = (RedisBackend, SentinelBackend, ClusterBackend)

#: How long an unread reply stream is kept, in seconds.
REPLY_S = 3600

#: Minimum wait for the reply stream, in seconds: to Redis, 0 means for ever.
MIN_WAIT_S = 0.001


class Collector:
    """Awaits jobs. For use by one thread, but others may call `expect` and `drop`.

    Attributes:
        headers: Headers that the jobs' messages must have.
        retries: How long it waits for a backend that is away.
    """

    def __init__(
        self,
        app: Celery,
        retries: RetryPolicy,
        *,
        forgets_dropped: bool = False,
        reads_packed: bool = True,
    ) -> None:
        """Does not connect yet.

        Args:
            app: The app to which jobs are sent.
            retries: How long it waits for a backend that is away.
            forgets_dropped: Whether it removes results that are announced and not awaited any more.
            reads_packed: Whether vectors may come packed.

        Raises:
            SettingsError: The app's result backend is no Redis.
        """
        self.retries = retries
        self._backend = backend = redis_backend(app)
        self._errors = (*backend.connection_errors, *REFUSALS)
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
        name = uuid()
        wishes = {"reply": name, **(PACKED if reads_packed else {})}
        self.headers: Mapping[str, Any] = {HEADER: {"v": VERSION, **wishes}}
        self._key = stream_key(backend, name)
        self._is_made = False
        #: Id of the last entry that was read.
        self._last = b"0"
        #: Oldest first.
        self._awaited: dict[str, None] = {}
        self._interval_s = MIN_INTERVAL_S
        self._poll_at_s = time.monotonic()
        self._is_announced = False
        #: Those that the next polls ask for, oldest last.
        self._left: list[str] = []

    @property
    def awaited(self) -> KeysView[str]:
        """The jobs that have not ended, oldest first."""
        return self._awaited.keys()

    def expect(self, task_ids: Iterable[str]) -> None:
        """Awaits jobs; to be called before they are sent. Raises what a `RetryPolicy` raises."""
        if not self._is_made:
            self.retries.call(self._make_reply, self._errors)
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
        if self._awaited and time.monotonic() >= self._poll_at_s:
            for ended in self._poll():
                wait_s = 0
                yield ended
        left_s = self._poll_at_s - time.monotonic() if self._awaited else wait_s
        for ended in self._read_announced(max(0.0, min(wait_s, left_s))):
            self._is_announced = True
            yield ended

    def poll_all(self) -> Iterator[tuple[str, Answer]]:
        """Yields all jobs whose results are stored by now."""
        yield from self._fetch(list(self._awaited))

    def _read(self, task_ids: Iterable[str]) -> Iterator[tuple[str, Answer]]:
        """How those of these jobs ended that have, awaited or not."""
        for chunk in chunks(iter(task_ids), CHUNK):
            fetch = partial(self._client.mget, self._keys(chunk))
            values = self.retries.call(fetch, self._errors)
            for task_id, value in zip(chunk, values, strict=True):
                if value is not None and (answer := read_stored(self._backend, value)):
                    yield task_id, answer

    def find_missing(self, task_ids: Sequence[str], in_flight: Collection[str]) -> list[str]:
        """Jobs out of some that have not ended, and are not among those in flight."""
        absent = [task_id for task_id in task_ids if task_id not in in_flight]
        ended = {task_id for task_id, _ in self._read(absent)}
        return [task_id for task_id in absent if task_id not in ended]

    def forget(self, task_ids: Sequence[str]) -> None:
        """Removes results from the backend; raises what a `RetryPolicy` raises."""
        for chunk in chunks(iter(task_ids), CHUNK):
            self.retries.call(partial(self._client.unlink, *self._keys(chunk)), self._errors)

    def close(self) -> None:
        """Removes everything but results; `expect` makes it anew."""
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

    def _poll(self) -> Iterator[tuple[str, Answer]]:
        """Asks for the next jobs, and decides when to do so again: soon where that finds any."""
        began_s, found = time.monotonic(), 0
        if not self._left:
            # Reversed, as jobs are taken from the end and the oldest must come first.
            self._left = list(self._awaited)[::-1]
        asked = [self._left.pop() for _ in range(min(POLL_JOBS, len(self._left)))]
        for ended in self._fetch(asked):
            found += 1
            yield ended
        if self._is_announced:
            self._interval_s = MAX_INTERVAL_S
        else:
            # Half of what was needed to find some, so that it settles at what is worth a poll.
            factor = 0.5 if found > len(asked) / 8 else 1.5
            self._interval_s = min(max(self._interval_s * factor, MIN_INTERVAL_S), MAX_INTERVAL_S)
        now_s = time.monotonic()
        rest_s = (now_s - began_s) * (REST_PER_POLL if self._is_announced else 1.0)
        self._poll_at_s = now_s + max(self._interval_s, min(rest_s, MAX_REST_S))
        self._is_announced = False

    def _read_announced(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        if wait_s and len(self._awaited) >= GATHER_JOBS:
            # Each read costs a round trip, so let several announcements arrive.
            time.sleep(min(wait_s, GATHER_S))
        read, ids = partial(self._read_entries, min(wait_s, self._longest_wait_s)), list[str]()
        for entry_id, entry in self.retries.call(read, self._errors):
            self._last = entry_id
            ids += read_ids(entry)
        if self._forgets_dropped:
            self.forget([each for each in ids if each not in self._awaited])
        yield from self._fetch(ids)

    def _read_entries(self, wait_s: float) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
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
        return list_entries(answer)

    def _fetch(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        """How those of these jobs ended that have, each once."""
        for task_id, answer in self._read([each for each in task_ids if each in self._awaited]):
            if task_id in self._awaited:
                self._awaited.pop(task_id, None)
                yield task_id, answer

    def _keys(self, task_ids: Sequence[str]) -> list[Any]:
        return [self._backend.get_key_for_task(task_id) for task_id in task_ids]


def redis_backend(app: Celery) -> Any:
    """The result backend of an app.

    Raises:
        SettingsError: It is no Redis.
    """
    if not isinstance(app.backend, RedisBackend):
        raise SettingsError(
            f"app {app.main!r}: results are read from Redis, and its result backend is"
            f" {type(app.backend).__name__}; set result_backend to a Redis URL"
        )
    return app.backend


def read_stored(backend: Any, payload: bytes) -> Answer | None:
    """Reads what a backend has stored; None while the job has not ended, an error if it is odd."""
    try:
        is_plain = backend.serializer == "json" and type(backend) in PLAIN_BACKENDS
        meta = read_json(payload) if is_plain else backend.decode(payload)
        found = meta.get("status"), meta.get("result"), meta.get("batch")
        return read_answer(*found, is_packed=is_packed(meta))
    except (KombuError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return Answer(error=(type(error).__name__, f"a result that cannot be read: {error}"))


def list_entries(answer: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries that an XREAD brings: in RESP3 with a mapping and a list around them."""
    if isinstance(answer, dict):
        return [entry for lists in answer.values() for entries in lists for entry in entries]
    return [entry for _, entries in answer or () for entry in entries]
