"""The context in which a thread completes one job by Celery's own tracer, and its outbox.

A worker sets it around the tracer. The task takes the outcome from it that a device has computed.
The result backend takes the facts of the batch, and holds the result back. The transport publishes
each message once. Every command waits while Redis is away, until the deadline.

Celery's tracer first publishes callbacks, the next step of a chain, and retries. Then it stores the
result and acknowledges. If a worker is killed in between, the job runs again, and would publish
again. The outbox prevents that in one of two ways. It holds everything back, and all of it is
written in one step with the acknowledgement. Or it publishes each message together with a dedupe
key, under the tag of the job's own message; the acknowledgement removes the dedupe keys.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from kombu.utils.json import dumps

from batchery.redis_scripts import ScriptCall
from batchery.retry import RetryDeadline


class LeaseHolder(Protocol):
    """A worker that holds leases."""

    #: The client of the Redis where they are.
    client: Any

    @property
    def lease_key(self) -> str:
        """HASH of its leases; a fenced worker gets another one."""


#: Holder and token of a lease.
Lease = tuple[LeaseHolder, str]


class PublishingChannel(Protocol):
    """A channel that can publish a message with a dedupe key."""

    def is_beside(self, holder: LeaseHolder) -> bool:
        """Whether its queues are in the same database of the same server as a worker's leases."""

    def publish_once(
        self, tag: str, dedupe_key: str, held: "HeldMessage", lease: Lease | None
    ) -> None:
        """Puts a message into its queue, unless its dedupe key is there, or the lease is gone."""


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message that an outbox holds back."""

    channel: PublishingChannel
    #: Key of the queue, or of one of its priority steps.
    queue_key: str
    message: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The message as it stands in a queue."""
        return str(dumps(self.message))


class Outbox:
    """What the completion of one job publishes and stores."""

    def __init__(
        self,
        publish_tag: str,
        known: Mapping[str, Any],
        lease: Lease | None = None,
        *,
        task_id: str = "",
    ) -> None:
        """Holds nothing back yet: messages are published at once, and results are stored.

        Args:
            publish_tag: Tag of the job's message. All deliveries of a message have the same tag; a
                job that is submitted once more gets another one.
            known: The job's id, and what follows the job: callbacks, chain, chord. A message whose
                id occurs here keeps that id when the job runs again.
            lease: Holder and token of the job's lease; None if it has none. Nothing is published
                without the lease, but to another database or server than that of the lease: there
                a message goes at once, with a dedupe key that nobody removes before its time.
            task_id: Id of the job, whose result may be held back.
        """
        self.publish_tag = publish_tag
        self.lease = lease
        self.task_id = task_id
        self._known = known
        #: How many messages of each name are published.
        self._published: Counter[str] = Counter()
        #: Whether Redis has dedupe keys of this job.
        self.has_dedupe_keys = False
        #: Whether messages and the result are held back.
        self.holds = False
        self.messages: list[HeldMessage] = []
        #: The result in its stored form; empty if none is held back.
        self.result: bytes | str = b""
        #: In how many seconds it expires; 0 for never.
        self.expires_s = 0
        self._store: Callable[[], None] | None = None
        #: Calls of Celery's script that counts parts of chords.
        self.part_calls: list[ScriptCall] = []
        self._counts: list[Callable[[], None]] = []

    def hold_result(self, result: bytes | str, expires_s: int, store: Callable[[], None]) -> None:
        """Holds back a result in its stored form; `store` stores it in Celery's own way."""
        self.result, self.expires_s, self._store = result, expires_s, store

    def hold_part(self, count: Callable[[], None]) -> None:
        """Holds back a part of a chord; `count` counts it in Celery's own way.

        That sends the body after the last part. The script's call goes into `part_calls`.
        """
        self._counts.append(count)

    def holds_result(self, task_id: str) -> bool:
        """Whether the result of a job must be held back."""
        return self.holds and task_id == self.task_id

    def publish(self, held: HeldMessage) -> None:
        """Publishes a message, or holds it back."""
        lease = self.lease
        if lease is not None and not held.channel.is_beside(lease[0]):
            lease = None
        elif self.holds:
            self.messages.append(held)
            return
        name = self._name(held.message)
        # Equal ones are counted when they are in their queue: kombu may try one of them again.
        dedupe_key = f"{name} {self._published[name] + 1}"
        held.channel.publish_once(self.publish_tag, dedupe_key, held, lease)
        self._published[name] += 1
        self.has_dedupe_keys = True

    def replay(self) -> None:
        """Writes now what was held back: messages, each with a dedupe key, result, chord parts."""
        self.holds = False
        for held in self.messages:
            self.publish(held)
        if self._store is not None:
            self._store()
        for count in self._counts:
            count()

    def _name(self, message: Mapping[str, Any]) -> str:
        """Names a message: the same name when the job runs again.

        Args:
            message: In the form that kombu puts into a queue. What a hook publishes by kombu alone
                is no task's, and has no id.
        """
        headers = message.get("headers") or {}
        task_id, task = headers.get("id"), headers.get("task")
        if task_id and str(task_id) in self._known_ids:
            return f"id {task_id} {task} {headers.get('retries')}"
        # A callback, for instance, gets a new id in each run, so its body names it.
        return f"body {task} {hashlib.sha256(str(message.get('body')).encode()).hexdigest()}"

    @cached_property
    def _known_ids(self) -> str:
        return json.dumps(self._known, default=str)


@dataclass(slots=True)
class JobCompletion:
    """The completion of one job."""

    #: Id of the job; empty if only the deadline matters.
    task_id: str = ""
    #: The outcome that the device computed, as `batchery.outcomes` defines it.
    outcome: Any = None
    #: Whether the task has taken the outcome, or there is none to take.
    is_answered: bool = True
    #: Facts of the batch, stored with the result; None for a job that was in no batch.
    info: Mapping[str, Any] | None = None
    #: What the job publishes and stores; None if another transport brought its message.
    outbox: Outbox | None = None
    #: How long the whole completion waits for a Redis that is away.
    deadline: RetryDeadline = field(default_factory=RetryDeadline)

    def answers(self, task_id: str | None) -> bool:
        """Whether the outcome belongs to this job, and nobody has taken it yet."""
        return not self.is_answered and task_id == self.task_id

    def answer(self) -> Any:
        """Hands out the outcome, once."""
        self.is_answered = True
        return self.outcome

    @property
    def publish_tag(self) -> str | None:
        """Tag of the job's message, the same at each delivery; None for other transports."""
        return None if self.outbox is None else self.outbox.publish_tag


_current: ContextVar[JobCompletion | None] = ContextVar("batchery_completion", default=None)


def current_completion() -> JobCompletion | None:
    """The completion that this thread works on; None outside of any."""
    return _current.get()


@contextmanager
def completing(completion: JobCompletion) -> Iterator[JobCompletion]:
    """Makes a completion the current one of this thread, within the block."""
    token = _current.set(completion)
    try:
        yield completion
    finally:
        _current.reset(token)
