"""What gateways remember of the tasks that they sent: in Redis, as any of them may be asked."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
from celery import states, uuid
from kombu.exceptions import KombuError

from batchery_producer.answers import describe
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

#: How long sending may take, in seconds; then a repeated request sends the task again.
SENDING_S = 30

#: In how many seconds to come again while the same request is being sent.
SENDING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task that was sent.

    Attributes:
        id: Celery's id of it, a random UUID.
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

    @classmethod
    def new(cls, task: str, caller: str, count: int) -> "TaskRecord":
        """A record with an id of its own."""
        return cls(uuid(), task, caller, count)

    def with_id(self, task_id: str) -> "TaskRecord":
        """The same with another id."""
        return replace(self, id=task_id)


class TaskRecords:
    """Keeps a record of each task, for as long as its result may be there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        expires = getattr(store.backend, "expires", None)
        #: Within how many seconds a worker must begin a task; its result is kept as long. None is
        #: for ever.
        self.expires_s: int | None = int(expires) if expires else None
        #: A result comes before the first of these ends, and ends before the second.
        self.lifetime_s = None if self.expires_s is None else 2 * self.expires_s

    async def add(self, record: TaskRecord) -> None:
        """Keeps a record.

        Raises:
            Problem: Redis is away.
        """
        key, value = self._key(record.id), json.dumps(asdict(record))
        await self._store.run(lambda client: client.set(key, value, ex=self.lifetime_s))

    async def find(self, task_id: str, caller: str) -> TaskRecord:
        """The record of a task.

        Raises:
            Problem: There is none, or it is of another caller; or Redis is away.
        """
        found = await self._store.run(lambda client: client.get(self._key(task_id)))
        record = None if found is None else TaskRecord(**json.loads(found))
        if record is None or record.caller != caller:
            raise Problem(
                Kind.NOT_FOUND,
                f"task {task_id!r:.100}: no task of yours has this id, or its result has expired",
                code="task_not_found",
            )
        return record

    async def revoke(self, record: TaskRecord) -> TaskRecord:
        """Notes that a task is not wanted.

        Raises:
            Problem: Redis is away.
        """
        revoked = replace(record, revoked=True)
        await self.add(revoked)
        return revoked

    async def state(self, record: TaskRecord) -> dict[str, Any]:
        """As `read_state`, on another thread."""
        return await asyncio.to_thread(self.read_state, record)

    def read_state(self, record: TaskRecord) -> dict[str, Any]:
        """How a task is: `id`, `task`, `status`, and `result`, `results` or `error`.

        Raises:
            Problem: Redis is away.
        """
        key = self._store.backend.get_key_for_task(record.id)
        payload = self._store.call(lambda client: client.get(key))
        if payload is None and self.lifetime_s is not None:
            # It may wait for longer than the record would be kept, if somebody still asks.
            lifetime_s = self.lifetime_s
            self._store.call(lambda client: client.expire(self._key(record.id), lifetime_s))
        return {"id": record.id, "task": record.task, **self._describe(record, payload)}

    def _describe(self, record: TaskRecord, payload: bytes | None) -> dict[str, Any]:
        meta: Mapping[str, Any] = {}
        if payload is not None:
            try:
                meta = self._store.backend.decode(payload)
            except (KombuError, ValueError, RecursionError) as error:
                return _unreadable(error)
        status, result = meta.get("status", states.PENDING), meta.get("result")
        if status == states.SUCCESS:
            value = {"results" if record.count else "result": result}
            try:
                if b"null" in to_json(value):
                    # orjson passes NaN off as null, and JSON knows no infinite numbers.
                    json.dumps(value, allow_nan=False, default=str)
            except (TypeError, ValueError, RecursionError) as error:
                return _unreadable(error)
            return {"status": status, **value}
        if status in states.READY_STATES:
            kind, message = describe(result)
            return {"status": status, "error": {"type": kind, "message": message}}
        if record.revoked:
            return {
                "status": states.REVOKED,
                "error": {"type": "TaskRevokedError", "message": "revoked"},
            }
        return {"status": status}

    # A request that is sent again

    async def once(self, caller: str, key: str, digest: str) -> tuple[str, bool]:
        """The id of the task of an idempotency key.

        Args:
            caller: Whose key it is.
            key: What the caller says.
            digest: Digest of the request.

        Returns:
            The id, and whether the task must be sent now.

        Raises:
            Problem: The key was used for another request, or the request is just being sent; or
                Redis is away.
        """
        name = self._once_key(caller, key)
        record = orjson.dumps({"id": uuid(), "digest": digest})

        def claim(client: Any) -> tuple[dict[str, str], bool, bool]:
            client.set(name, record, nx=True, ex=self.lifetime_s)
            known = json.loads(client.get(name) or record)
            if client.exists(self._key(known["id"])):
                return known, True, False
            return known, False, bool(client.set(name + b":sending", b"", nx=True, ex=SENDING_S))

        known, was_sent, may_send = await self._store.run(claim)
        if known["digest"] != digest:
            raise Problem(
                Kind.CONFLICT, "Idempotency-Key: was used for another request; make a new one"
            )
        if not was_sent and not may_send:
            raise Problem(
                Kind.CONFLICT,
                "Idempotency-Key: the same request is being sent; ask again for its answer",
                retry_after_s=SENDING_RETRY_S,
            )
        return known["id"], not was_sent

    async def not_sent(self, caller: str, key: str) -> None:
        """Forgets an idempotency key whose task could not be sent.

        Raises:
            Problem: Redis is away.
        """
        name = self._once_key(caller, key)
        await self._store.run(lambda client: client.delete(name, name + b":sending"))

    def _key(self, task_id: str) -> bytes:
        return self._store.key("task", task_id)

    def _once_key(self, caller: str, key: str) -> bytes:
        digest = hashlib.sha256(f"{caller}\n{key}".encode()).hexdigest()
        return self._store.key("once", digest)


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


def _unreadable(error: Exception) -> dict[str, Any]:
    message = f"the task succeeded, but its result is no JSON: {error}"
    return {
        "status": states.FAILURE,
        "error": {"type": "UnserialisableResult", "message": message},
    }
