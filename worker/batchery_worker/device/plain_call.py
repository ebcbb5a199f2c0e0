"""Jobs that need nothing of Celery: read in a microsecond, and stored by the device's own commit.

Nearly all jobs are. Celery's request is made of one only where somebody needs it: it fails, has a
hook that looks, is revoked, or remote control asks which jobs are here.
"""

from binascii import a2b_base64
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from celery.worker import state as worker_state
from pydantic_core import from_json

from batchery.protocol.headers import Form
from batchery.transport.lease_store import LeaseStore
from batchery_worker.in_flight import TaskCall
from batchery_worker.request import LeaseHandle

#: Headers that only Celery's own code handles, if a message has one of them.
ODD_HEADERS = (
    *("eta", "expires", "shadow", "replaced_task_nesting", "stamped_headers", "compression"),
    "redelivered",
)

#: How values are marked that JSON has no type for.
TYPE_MARK = b'"__type__"'

_REVOKED: Any = worker_state.revoked

#: Makes a call of a message by Celery's own request: of the payload, as it stood in its queue.
MakeCall = Callable[[Any], TaskCall]


class PlainCall:
    """A call of a batch task that is stored by its device; in the place of a `TaskCall`."""

    __slots__ = (
        *("store", "token", "task_name", "task_id", "message", "keywords", "publish_tag"),
        *("items", "is_multi_item", "context", "accepted", "tracer_reason", "listened"),
        *("_payload", "_make", "_full", "_pid"),
    )

    store: LeaseStore
    token: str
    items: Sequence[Any]
    is_multi_item: Form

    def __init__(
        self, store: LeaseStore, token: str, payload: Any, message: dict[str, Any], make: MakeCall
    ) -> None:
        """Of a message that was read.

        Args:
            store: Has its lease.
            token: That of its lease.
            payload: The message as it stood in its queue.
            message: Its headers, with `args` and `kwargs`.
            make: Makes a call by Celery's request, where one is needed.
        """
        self.store = store
        self.token = token
        self.message = message
        self.task_name, self.task_id = message["task"], message["id"]
        self.keywords = message["kwargs"]
        self.publish_tag = payload["properties"].get("publish_tag")
        self.context = b""
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
        return LeaseHandle(self.store, self.token)

    @property
    def full(self) -> TaskCall:
        """The same with Celery's request."""
        if self._full is None:
            self._full = full = self._make(self._payload)
            worker_state.task_reserved(full.request)
            if self.accepted:
                full.accept(self._pid)
        return self._full

    def accept(self, pid: int) -> None:
        """Notes that it begins in a process."""
        self._pid = pid
        if self._full is not None:
            self._full.accept(pid)

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has revoked it; only of a plain one."""
        return self.task_id not in _REVOKED

    @property
    def request(self) -> Any:
        """Celery's request."""
        return self.full.request

    @property
    def target(self) -> Any:
        """Celery's tracer."""
        return self.full.target

    @property
    def args(self) -> Any:
        """Arguments of the tracer."""
        return self.full.args

    @property
    def callback(self) -> Any:
        """Called with the tracer's answer."""
        return self.full.callback

    @property
    def error_callback(self) -> Any:
        """Called where the tracer has none."""
        return self.full.error_callback


def read_plain(payload: Any, tasks: Collection[str]) -> dict[str, Any] | None:
    """The headers of a plain message, with its arguments; None for any other.

    Args:
        payload: The message as it stood in its queue, read.
        tasks: Names of the tasks whose jobs may be plain.
    """
    headers, properties = payload["headers"], payload["properties"]
    if headers.get("task") not in tasks or payload["content-type"] != "application/json":
        return None
    if any(map(headers.get, ODD_HEADERS)):
        return None
    task_id, body = headers.get("id"), payload["body"]
    if type(task_id) is not str or not task_id.isprintable():
        return None
    info = properties.get("delivery_info") or {}
    if info.get("redelivered") or type(body) is not str or task_id in _REVOKED:
        return None
    text = a2b_base64(body) if properties.get("body_encoding") == "base64" else body.encode()
    if TYPE_MARK in text:
        return None
    args, keywords, embed = from_json(text, cache_strings="keys")
    if any(embed.values()) or type(args) is not list or type(keywords) is not dict:
        return None
    return {**headers, "args": args, "kwargs": keywords, "delivery_info": info}
