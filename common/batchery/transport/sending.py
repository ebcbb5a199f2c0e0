"""What the completion of a job sends, each message once: also if the completion runs twice.

Celery's tracer publishes callbacks, the next step of a chain, and retries before it stores the
result and acknowledges. A worker that is killed in between leaves a job that runs again, and would
publish again. So every message is marked, in the script that puts it into its queue, under the tag
of the job's own message; the marks go with its acknowledgement.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import redis
from kombu.utils.json import dumps

from batchery.transport.keys import Keys
from batchery.transport.scripts import Scripts

if TYPE_CHECKING:
    _Channel: Any
else:
    _Channel = object

#: How long marks stay where no acknowledgement takes them, in seconds: until a job that was
#: interrupted has run again. It is put at the head of its queue.
MARKS_TTL_S = 3600


class Holder(Protocol):
    """A worker that holds leases."""

    @property
    def lease_key(self) -> str:
        """HASH of its leases; another one after a fence."""


class Sending:
    """Messages that the completion of one job has sent so far."""

    def __init__(
        self,
        publish_tag: str,
        known: Mapping[str, Any],
        lease: tuple[Holder, str] | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            publish_tag: Of the job's message; the same however often it is delivered, another one
                where somebody submits the job once more.
            known: The job's headers and what follows it (callbacks, chain, chord), in which ids
                that are given already can be found.
            lease: Holder and token of the job's lease, without which nothing is sent; None where it
                is not on the server that the messages go to.
        """
        self.publish_tag = publish_tag
        self.lease = lease
        self._known = known
        self._bodies: Counter[str] = Counter()
        self._marks: dict[str, str] = {}
        #: Whether there are marks.
        self.is_marked = False
        #: Messages that somebody else will send, all at once; None where each is sent at once.
        self.outbox: list[Unsent] | None = None

    def mark(self, message: Mapping[str, Any]) -> str:
        """Names a message so that it has the same name when the job runs again, and only then.

        Args:
            message: As kombu puts it into a queue; again with the same id, if kombu tries again.
        """
        headers = message.get("headers") or {}
        task_id = str(headers.get("id"))
        if task_id not in self._marks:
            self._marks[task_id] = self._name(task_id, headers, message.get("body"))
        return self._marks[task_id]

    def _name(self, task_id: str, headers: Mapping[str, Any], body: Any) -> str:
        if task_id in self._ids:
            return f"id {task_id} {headers.get('task')} {headers.get('retries')}"
        # Of a callback, for instance, which gets a new id each time. Two may be equal.
        name = f"body {headers.get('task')} {hashlib.sha256(str(body).encode()).hexdigest()}"
        self._bodies[name] += 1
        return f"{name} {self._bodies[name]}"

    @cached_property
    def _ids(self) -> str:
        return json.dumps(self._known, default=str)


@dataclass(frozen=True, slots=True)
class Unsent:
    """A message that waits in an outbox."""

    channel: "SendingChannel"
    #: Of the queue, or of one of its priority steps.
    queue_key: str
    message: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The message as it stands in a queue."""
        return str(dumps(self.message))

    def send(self, sending: Sending) -> None:
        """Sends it after all, marked as the job's that is being completed."""
        self.channel.send_marked(sending, self.queue_key, self.message)


_sending: ContextVar[Sending | None] = ContextVar("batchery_sending", default=None)


@contextmanager
def sending_once(
    publish_tag: str | None,
    known: Mapping[str, Any],
    lease: tuple[Holder, str] | None = None,
) -> Iterator[Sending | None]:
    """Has every message that this thread puts into a queue sent once, however often it comes here.

    Args:
        publish_tag: Of the job that sends; None for one that another transport brought.
        known: As for `Sending`.
        lease: As for `Sending`.
    """
    sending = Sending(publish_tag, known, lease) if publish_tag else None
    token = _sending.set(sending)
    try:
        yield sending
    finally:
        _sending.reset(token)


def sending_tag() -> str | None:
    """The tag of the job whose completion sends on this thread; None where there is none."""
    sending = _sending.get()
    return sending.publish_tag if sending is not None else None


class SendingChannel(_Channel):  # type: ignore[misc]
    """Mixed into kombu's Redis channels."""

    def _put(self, queue: str, message: Mapping[str, Any], **kwargs: Any) -> None:
        sending = _sending.get()
        is_plain = kwargs.get("_publish_batch") is None and queue not in (self._expires or ())
        if sending is None or not is_plain:
            super()._put(queue, message, **kwargs)
            return
        priority = self._get_message_priority(message, reverse=False)
        key = Keys(self.global_keyprefix).queue(self._q_for_pri(queue, priority))
        if sending.outbox is None:
            self.send_marked(sending, key, message)
        else:
            sending.outbox.append(Unsent(self, key, message))

    def send_marked(self, sending: Sending, key: str, message: Mapping[str, Any]) -> None:
        """Puts a message into a queue, unless its mark says that it was there before.

        Args:
            sending: Of the job that sends.
            key: Of the queue.
            message: As kombu makes it.
        """
        keys = [Keys(self.global_keyprefix).sent(sending.publish_tag), key]
        args = [sending.mark(message), MARKS_TTL_S, dumps(message)]
        if sending.lease is not None:
            holder, token = sending.lease
            keys.append(holder.lease_key)
            args.append(token)
        self._senders.run("send", keys, *args)
        sending.is_marked = True

    @cached_property
    def _senders(self) -> Scripts:
        # Kombu's own client puts its prefix before the first key of a script alone.
        return Scripts(redis.Redis(connection_pool=self.pool))
