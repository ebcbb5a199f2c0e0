"""The Redis of the results: commands, and records of the tasks that the gateway sent.

In that Redis gateways and their workers keep what a kill must not lose, and any gateway may be
asked. Results are left where they are, so that several may read them.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NotRequired

import orjson
import redis
from celery import Celery, states
from celery.backends.redis import RedisBackend
from kombu.exceptions import KombuError
from pydantic import Field
from typing_extensions import TypedDict

from batchery.protocol.headers import backend_prefix
from batchery_producer.answers import describe
from batchery_producer.gateway.problems import SERVER_TEXTS, Kind, Problem, redis_problem


class Store:
    """Runs commands on the result backend's Redis.

    Its keys begin like those of results, so that apps with prefixes of their own stay apart.
    """

    def __init__(self, app: Celery) -> None:
        #: Celery's backend; one for all threads, as its client is.
        self.backend: Any = app.backend
        self._is_redis = isinstance(self.backend, RedisBackend)
        self._prefix = backend_prefix(self.backend) if self._is_redis else b""

    def key(self, *parts: str) -> bytes:
        """A key of the gateway's own."""
        return self._prefix + b":".join((b"batchery:http", *(part.encode() for part in parts)))

    async def run(self, call: Callable[[Any], Any]) -> Any:
        """As `call`, on another thread."""
        return await asyncio.to_thread(self.call, call)

    def call(self, call: Callable[[Any], Any]) -> Any:
        """Calls a function with the Redis client.

        Raises:
            Problem: Redis is away, or is not the app's result backend.
        """
        if not self._is_redis:
            raise Problem(
                Kind.UNAVAILABLE, "this route needs a Redis as result backend; set result_backend"
            )
        try:
            return call(self.backend.client)
        except redis.RedisError as error:
            raise redis_problem(error) from error


# Tasks that were sent


#: How often a result is looked for that somebody waits for, in seconds: at first, and later.
LOOK_S, LONG_LOOK_S = 0.02, 0.5

#: Part of the time that has passed after which it is looked for again.
LOOK_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task that was sent.

    Attributes:
        id: Celery's id of it, a UUID.
        task: Name of the task.
        caller: Name of the key that sent it; no other key learns of it.
        count: Number of items; 0 if it has a single one, or arguments.
        revoked: Whether its caller does not want it any more.
    """

    id: str
    task: str
    caller: str
    count: int = 0
    revoked: bool = False


class TaskError(TypedDict):
    """Why a task or an item failed: what its worker raised."""

    type: str
    message: str


class ItemResult(TypedDict):
    """How an item ended: one of the two."""

    ok: NotRequired[Any]
    error: NotRequired[TaskError]


class TaskState(TypedDict):
    """How a task is."""

    id: str
    task: str
    status: Annotated[str, Field(description="Celery's name of the state, such as `SUCCESS`.")]
    result: NotRequired[Any]
    results: NotRequired[Annotated[list[ItemResult], Field(description="Of a task with items.")]]
    error: NotRequired[TaskError]


def has_ended(state: TaskState) -> bool:
    """Whether a task has a result."""
    return state["status"] in states.READY_STATES


class TaskRecords:
    """Keeps a record of each task, for as long as its result may be there."""

    def __init__(self, store: Store, kind: str = "task") -> None:
        """Prepares.

        Args:
            store: Where they are kept.
            kind: What they are of, `task` or `stream`: an id of the one is none of the other.
        """
        self._store = store
        self._kind = kind
        expires = getattr(store.backend, "expires", None)
        #: Within how many seconds a worker must begin a task; its result is kept as long. None is
        #: for ever.
        self.expires_s: int | None = int(expires) if expires else None
        #: A result comes before the first of these ends, and ends before the second.
        self._lifetime_s = None if self.expires_s is None else 2 * self.expires_s

    async def add(self, record: TaskRecord) -> None:
        """Keeps a record.

        Raises:
            Problem: Redis is away.
        """
        key, value = self._key(record.id), json.dumps(asdict(record))
        await self._store.run(lambda client: client.set(key, value, ex=self._lifetime_s))

    async def find(self, task_id: str, caller: str, task: str | None = None) -> TaskRecord:
        """The record of a task.

        Args:
            task_id: Its id.
            caller: Whose it must be.
            task: Name that it must have; None for any.

        Raises:
            Problem: There is none, or it is of another caller; or Redis is away.
        """
        record = await asyncio.to_thread(self.read, task_id)
        if record is None or record.caller != caller or task not in (None, record.task):
            kind = self._kind
            raise Problem(
                Kind.NOT_FOUND,
                f"{kind} {task_id!r:.100}: no {kind} of yours has this id, or its result has"
                " expired",
                code=f"{kind}_not_found",
            )
        return record

    def read(self, task_id: str) -> TaskRecord | None:
        """The record of a task; None if there is none."""
        found = self._store.call(lambda client: client.get(self._key(task_id)))
        return None if found is None else TaskRecord(**json.loads(found))

    async def wait_for_end(self, record: TaskRecord, wait_s: float) -> TaskState:
        """How a task is when it has ended, or after so many seconds."""
        began_s = time.monotonic()
        while True:
            state = await asyncio.to_thread(self.read_state, record)
            waited_s = time.monotonic() - began_s
            if has_ended(state) or waited_s >= wait_s:
                return state
            pause_s = min(max(LOOK_S, LOOK_SHARE * waited_s), LONG_LOOK_S)
            await asyncio.sleep(min(pause_s, wait_s - waited_s))

    def read_state(self, record: TaskRecord) -> TaskState:
        """How a task is."""
        keys = [self._key(record.id), self._store.backend.get_key_for_task(record.id)]
        known, payload = self._store.call(lambda client: client.mget(keys))
        if payload is None and self._lifetime_s is not None:
            # It may wait for longer than the record would be kept, if somebody still asks.
            self._store.call(lambda client: client.expire(keys[0], self._lifetime_s))
        is_revoked = known is not None and json.loads(known)["revoked"]
        state: TaskState = {"id": record.id, "task": record.task, "status": states.PENDING}
        try:
            self._describe(state, record.count, payload, is_revoked=is_revoked)
        except (KombuError, TypeError, ValueError, RecursionError) as error:
            message = f"the task succeeded, but its result is no JSON: {error}"
            state["status"] = states.FAILURE
            state["error"] = {"type": "UnserialisableResult", "message": message}
        return state

    def _describe(
        self, state: TaskState, count: int, payload: bytes | None, *, is_revoked: bool
    ) -> None:
        """Adds status, and `result`, `results` or `error`.

        Raises:
            Exception: The result is no JSON.
        """
        meta = {} if payload is None else self._store.backend.decode(payload)
        status, result = meta.get("status", states.PENDING), meta.get("result")
        if status == states.SUCCESS:
            if b"null" in to_json(result):
                # orjson passes NaN off as null, and JSON knows no infinite numbers.
                json.dumps(result, allow_nan=False, default=str)
            state["results" if count else "result"] = result
        elif status in states.READY_STATES:
            kind, message = describe(result)
            state["error"] = {"type": kind, "message": SERVER_TEXTS.get(kind, message)}
        elif is_revoked:
            status = states.REVOKED
            state["error"] = {"type": "TaskRevokedError", "message": "revoked"}
        state["status"] = status

    def _key(self, task_id: str) -> bytes:
        return self._store.key(self._kind, task_id)


def to_json(value: Any) -> bytes:
    """Writes a value as JSON.

    Raises:
        TypeError: It has something that JSON does not know.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        # It takes numbers of any length, unlike orjson.
        return json.dumps(value, allow_nan=False).encode()
