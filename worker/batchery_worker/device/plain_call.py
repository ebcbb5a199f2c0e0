"""Jobs that need nothing of Celery: read in a microsecond, and stored by the device's own commit.

Nearly all jobs are. Celery's request is made of one only where somebody needs it: it fails, has a
hook that looks, is revoked, or remote control asks which jobs are here.
"""

from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from celery.worker import state as worker_state
from pydantic_core import from_json

from batchery.protocol.headers import (
    DEADLINE,
    HEADER,
    SENT_AT,
    TENANT,
    Form,
    read_deadline,
    read_items,
    read_sent_at,
)
from batchery.transport.lease_store import LeaseStore
from batchery_worker.dispatch.admission import Admission, encode_keywords
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import BatchKey, Job, Limits, TimeLimits
from batchery_worker.request import LeaseHandle

#: Headers that only Celery's own code handles, if a message has one of them.
ODD_HEADERS = (
    *("eta", "expires", "shadow", "replaced_task_nesting", "stamped_headers", "compression"),
    "redelivered",
)

#: How values are marked that JSON has no type for.
TYPE_MARK = b'"__type__"'

_REVOKED: Any = worker_state.revoked

#: Sends a task event: its type, and its fields.
SendEvent = Callable[..., None]

#: Makes a call of a message by Celery's own request: of what has its lease, and the payload as it
#: stood in its queue.
MakeCall = Callable[[LeaseStore, Any], TaskCall]


class PlainCall:
    """A call of a batch task that is stored by its device; in the place of a `TaskCall`."""

    __slots__ = (
        *("store", "token", "task_name", "task_id", "message", "keywords", "publish_tag"),
        *("items", "is_multi_item", "context", "accepted", "tracer_reason", "listened"),
        *("_lease", "_payload", "_make", "_full", "_pid", "send"),
    )

    store: LeaseStore
    token: str
    items: Sequence[Any]
    is_multi_item: Form

    def __init__(
        self,
        store: LeaseStore,
        token: str,
        payload: Any,
        message: dict[str, Any],
        make: MakeCall,
        send: SendEvent | None,
    ) -> None:
        """Of a message that was read.

        Args:
            store: Has its lease.
            token: That of its lease.
            payload: The message as it stood in its queue.
            message: Its headers, with `args` and `kwargs`.
            make: Makes a call by Celery's request, where one is needed.
            send: Sends its task events; None if nobody hears them.
        """
        self.store = store
        self.send = send
        self.token = token
        self.message = message
        self.task_name, self.task_id = message["task"], message["id"]
        self.keywords = message["kwargs"]
        self.publish_tag = payload["properties"].get("publish_tag")
        self.context: Mapping[str, Any] = {}
        self._lease = LeaseHandle(store, token)
        self.accepted = False
        self.tracer_reason: str | None = None
        self.listened: Any = None
        self._payload = payload
        self._make = make
        self._full: TaskCall | None = None
        self._pid = 0

    @property
    def is_plain(self) -> bool:
        """Whether nobody has needed Celery's request of it so far."""
        return self._full is None

    @property
    def embed(self) -> Mapping[str, Any]:
        """There is nothing that follows it."""
        return {}

    @property
    def lease(self) -> LeaseHandle | None:
        """Its lease; None if it has none any more."""
        if self._full is not None:
            return self._full.lease
        return self._lease

    @property
    def full(self) -> TaskCall:
        """The same with Celery's request."""
        if self._full is None:
            self._full = full = self._make(self.store, self._payload)
            worker_state.task_reserved(full.request)
            if self.accepted:
                request: Any = full.request
                eventer = request._eventer
                if self.send is not None:
                    # That it has begun was sent.
                    request._eventer = None
                full.accept(self._pid)
                request._eventer = eventer
        return self._full

    def accept(self, pid: int) -> None:
        """Notes that it begins in a process."""
        self._pid = pid
        if self._full is not None:
            self._full.accept(pid)
        elif self.send is not None:
            self.send("task-started", uuid=self.task_id)

    def tell_received(self) -> None:
        """Sends the event that it came, as Celery's consumer does, if anybody hears it."""
        if self.send is None:
            return
        message = self.message
        self.send(
            "task-received",
            uuid=self.task_id,
            name=self.task_name,
            args=message.get("argsrepr", ""),
            kwargs=message.get("kwargsrepr", ""),
            root_id=message.get("root_id"),
            parent_id=message.get("parent_id"),
            retries=message.get("retries", 0),
            eta=None,
            expires=None,
        )

    @property
    def request(self) -> Any:
        """Celery's request."""
        return self.full.request


class PlainReader:
    """Reads plain messages as jobs; what is the same for many jobs is worked out once."""

    def __init__(
        self,
        tasks: Mapping[str, tuple[Limits, TimeLimits, bool]],
        admission: Admission,
        make: MakeCall,
    ) -> None:
        """Has read none.

        Args:
            tasks: The tasks whose jobs may be plain: the limits of their batches, those of their
                time, and whether they send events.
            admission: Knows lanes, and reads odd items.
            make: See `PlainCall`.
        """
        self._tasks = tasks
        self._admission = admission
        self._make = make
        self._keys = {name: BatchKey(name, "", limits) for name, (_, limits, _) in tasks.items()}

    def read(
        self,
        store: LeaseStore,
        token: str,
        raw: bytes,
        now_s: float,
        unix_s: float,
        send: SendEvent | None = None,
    ) -> Job[Any] | None:
        """Reads a message.

        Args:
            store: Has its lease.
            token: That of its lease.
            raw: The message as it stood in its queue.
            now_s: The time, on the scheduler's clock.
            unix_s: The same in Unix seconds.
            send: Sends task events; None if nobody hears them.

        Returns:
            None for a message that is not plain, or malformed: Celery's own code says so.

        Raises:
            Exception: The same.
        """
        if TYPE_MARK in raw:
            return None
        payload = from_json(raw, cache_strings="keys")
        headers, properties = payload["headers"], payload["properties"]
        task, task_id, body = headers["task"], headers["id"], payload["body"]
        key = self._keys.get(task)
        if key is None or payload["content-type"] != JSON or any(map(headers.get, ODD_HEADERS)):
            return None
        info = properties["delivery_info"]
        if "redelivered" in info or not task_id.isprintable() or task_id in _REVOKED:
            return None
        text = a2b_base64(body) if properties.get("body_encoding") == "base64" else body.encode()
        args, keywords, embed = from_json(text, cache_strings="keys")
        if TYPE_MARK in text or any(embed.values()) or len(args) != 1:
            return None
        header = headers.get(HEADER)
        own_limits = headers.get("timelimit")
        if own_limits and own_limits != NO_LIMITS:
            return None
        if keywords or store.shard:
            key = BatchKey(task, encode_keywords(keywords), key.time_limits, store.shard)
        properties["publish_tag"], properties["delivery_tag"] = properties["delivery_tag"], token
        headers["args"], headers["kwargs"], headers["delivery_info"] = args, keywords, info
        limits, _, sends_events = self._tasks[task]
        told = send if sends_events else None
        call = PlainCall(store, token, payload, headers, self._make, told)
        call.items, call.is_multi_item = read_items(args[0], header)
        sent_s = headers.get(SENT_AT)
        return Job(
            task_id,
            key,
            limits,
            len(call.items),
            now_s,
            call,
            self._admission.find_lane(properties.get("priority"), headers.get(TENANT) or ""),
            now_s + read_deadline(headers) - unix_s if DEADLINE in headers else inf,
            waited_s=0.0 if sent_s is None else unix_s - read_sent_at(headers, unix_s),
        )


JSON = "application/json"

NO_LIMITS = [None, None]
