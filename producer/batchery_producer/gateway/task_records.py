"""What gateways remember of the tasks that they sent, and how they wait for their results.

Records are in Redis, as any gateway may be asked. Results are left where they are, so that several
may read them.
"""

import asyncio
import hashlib
import json
import logging
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NotRequired

import orjson
from celery import Celery, states, uuid
from kombu.exceptions import KombuError
from pydantic import Field
from typing_extensions import TypedDict

from batchery.retry import Interrupted, RetryPolicy
from batchery_producer.answers import describe
from batchery_producer.collector import Collector, collector_for
from batchery_producer.gateway.problems import SERVER_TEXTS, Kind, Problem
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
        self.lifetime_s = None if self.expires_s is None else 2 * self.expires_s

    async def add(self, record: TaskRecord) -> None:
        """Keeps a record.

        Raises:
            Problem: Redis is away.
        """
        key, value = self._key(record.id), json.dumps(asdict(record))
        await self._store.run(lambda client: client.set(key, value, ex=self.lifetime_s))

    async def find(self, task_id: str, caller: str, task: str | None = None) -> TaskRecord:
        """The record of a task.

        Args:
            task_id: Its id.
            caller: Whose it must be.
            task: Name that it must have; None for any.

        Raises:
            Problem: There is none, or it is of another caller; or Redis is away.
        """
        found = await self._store.run(lambda client: client.get(self._key(task_id)))
        record = None if found is None else TaskRecord(**json.loads(found))
        if record is None or record.caller != caller or task not in (None, record.task):
            kind = self._kind
            raise Problem(
                Kind.NOT_FOUND,
                f"{kind} {task_id!r:.100}: no {kind} of yours has this id, or its result has"
                " expired",
                code=f"{kind}_not_found",
            )
        return record

    async def revoke(self, record: TaskRecord) -> TaskRecord:
        """Notes that a task is not wanted."""
        revoked = replace(record, revoked=True)
        await self.add(revoked)
        return revoked

    async def state(self, record: TaskRecord) -> TaskState:
        """As `read_state`, on another thread."""
        return await asyncio.to_thread(self.read_state, record)

    def read_state(self, record: TaskRecord) -> TaskState:
        """How a task is."""
        key = self._store.backend.get_key_for_task(record.id)
        payload = self._store.call(lambda client: client.get(key))
        if payload is None and self.lifetime_s is not None:
            # It may wait for longer than the record would be kept, if somebody still asks.
            lifetime_s = self.lifetime_s
            self._store.call(lambda client: client.expire(self._key(record.id), lifetime_s))
        state: TaskState = {"id": record.id, "task": record.task, "status": states.PENDING}
        try:
            self._describe(state, record, payload)
        except (KombuError, TypeError, ValueError, RecursionError) as error:
            message = f"the task succeeded, but its result is no JSON: {error}"
            state["status"] = states.FAILURE
            state["error"] = {"type": "UnserialisableResult", "message": message}
        return state

    def _describe(self, state: TaskState, record: TaskRecord, payload: bytes | None) -> None:
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
            state["results" if record.count else "result"] = result
        elif status in states.READY_STATES:
            kind, message = describe(result)
            state["error"] = {"type": kind, "message": SERVER_TEXTS.get(kind, message)}
        elif record.revoked:
            status = states.REVOKED
            state["error"] = {"type": "TaskRevokedError", "message": "revoked"}
        state["status"] = status

    # A request that is sent again

    async def once(self, caller: str, key: str, digest: str) -> tuple[str, bool]:
        """The id of the task of an idempotency key.

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
        """Forgets an idempotency key whose task could not be sent."""
        name = self._once_key(caller, key)
        await self._store.run(lambda client: client.delete(name, name + b":sending"))

    def _key(self, task_id: str) -> bytes:
        return self._store.key(self._kind, task_id)

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


# Waiting for results


logger = logging.getLogger(__name__)

#: How long the thread waits for results at a time, in seconds; it notices `close` that late.
WAIT_S = 0.25

#: Pause after an error, in seconds.
ERROR_PAUSE_S = 1.0


class ResultWaiter:
    """One thread waits for all jobs that coroutines of this process wait for."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._ended = False
        self._wake = threading.Condition()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._collector: Collector | None = None
        self._thread: threading.Thread | None = None
        self._starting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    async def headers(self) -> dict[str, Any]:
        """Headers of jobs whose end workers should announce to this process.

        Raises:
            SettingsError: The app has no result backend.
            GaveUp: Redis stays away.
        """
        async with self._starting:
            if self._collector is None:
                collector = collector_for(self._app, RetryPolicy(lambda: self._ended))
                await asyncio.to_thread(collector.expect, ())
                self._collector = collector
                self._thread = threading.Thread(target=self._collect, daemon=True)
                self._thread.start()
        return dict(self._collector.headers)

    async def wait(self, task_id: str, wait_s: float) -> bool:
        """Waits for the end of a job.

        Args:
            task_id: Its id; the job need not have been sent yet.
            wait_s: How long, in seconds.

        Returns:
            Whether it has ended.
        """
        await self.headers()
        assert self._collector is not None
        future: asyncio.Future[None] = self._loop.create_future()
        with self._wake:
            waiting = self._waiting.setdefault(task_id, [])
            waiting.append(future)
            if len(waiting) == 1:
                self._collector.expect([task_id])
            self._wake.notify_all()
        try:
            async with asyncio.timeout(wait_s):
                await future
        except TimeoutError:
            return False
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(task_id) is waiting:
                del self._waiting[task_id]
                self._collector.drop([task_id])
        return True

    def close(self) -> None:
        """Ends the thread, and stops being announced to."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _collect(self) -> None:
        assert self._collector is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._waiting)
            if self._ended:
                break
            try:
                for task_id, _ in self._collector.collect(WAIT_S):
                    with suppress(RuntimeError):  # The event loop is closed, so nobody waits.
                        self._loop.call_soon_threadsafe(self._settle, task_id)
            except Interrupted:
                continue
            except Exception as error:  # noqa: BLE001 - this thread must go on
                logger.warning("results cannot be read, trying again: %s", error)
                time.sleep(ERROR_PAUSE_S)
        self._collector.close()

    def _settle(self, task_id: str) -> None:
        for future in self._waiting.pop(task_id, ()):
            if not future.done():
                future.set_result(None)
