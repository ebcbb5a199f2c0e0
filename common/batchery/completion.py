"""The context in which a thread completes one job by Celery's own tracer.

A worker sets it around the tracer. The task takes the outcome from it that a device has computed,
and the result backend the facts of the batch. Every command waits while Redis is away, until the
deadline.

Celery's tracer first publishes callbacks, the next step of a chain, and retries. Then it stores the
result and acknowledges. If a worker is killed in between, the job runs again, and would publish
again. So the transport publishes each message together with a dedupe key, under the tag of the
job's own message; the acknowledgement removes the dedupe keys.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from batchery.retry import RetryDeadline


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
    #: The `LeaseHandle` of its message: without the lease nothing is published or stored where the
    #: lease is. None if it has none.
    lease: Any = None
    #: Tag of its message, the same at each delivery; a job that is submitted once more gets another
    #: one. None for a message of another transport, whose job publishes as Celery does.
    publish_tag: str | None = None
    #: How many messages of each name are published.
    published: Counter[str] = field(default_factory=Counter)
    #: How long the whole completion waits for a Redis that is away.
    deadline: RetryDeadline = field(default_factory=RetryDeadline)

    def answers(self, task_id: str | None) -> bool:
        """Whether the outcome belongs to this job, and nobody has taken it yet."""
        return not self.is_answered and task_id == self.task_id

    def answer(self) -> Any:
        """Hands out the outcome, once."""
        self.is_answered = True
        return self.outcome


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
