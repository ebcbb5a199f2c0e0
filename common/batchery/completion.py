"""What a thread knows of the job that it is completing by Celery's own tracer.

A worker sets the completion around the tracer. From there the task takes the outcome that a device
has computed, the result backend takes the facts of the batch and holds the result back, the
transport publishes each message once, and whatever meets a Redis that is away waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from batchery.outbox import Outbox
from batchery.retry import RetryDeadline


@dataclass(slots=True)
class JobCompletion:
    """The completion of one job."""

    #: Id of the job; empty where only the deadline counts.
    task_id: str = ""
    #: What the task answers, as `batchery.outcomes` defines it; the device has computed it.
    outcome: Any = None
    #: Whether the task has answered, or has nothing to answer.
    is_answered: bool = True
    #: Facts of the batch, which are stored with the result; None for a job that was in no batch.
    facts: Mapping[str, Any] | None = None
    #: What the job publishes and stores; None where another transport brought its message.
    outbox: Outbox | None = None
    #: How long everything that is done for the job waits for a Redis that is away.
    deadline: RetryDeadline = field(default_factory=RetryDeadline)

    def answers(self, task_id: str | None) -> bool:
        """Whether this is the outcome of the job that asks, and it did not ask before."""
        return not self.is_answered and task_id == self.task_id

    def answer(self) -> Any:
        """The outcome, given away once."""
        self.is_answered = True
        return self.outcome

    @property
    def publish_tag(self) -> str | None:
        """Tag of the job's message, the same at each delivery; None for other transports."""
        return None if self.outbox is None else self.outbox.publish_tag


_current: ContextVar[JobCompletion | None] = ContextVar("batchery_completion", default=None)


def current_completion() -> JobCompletion | None:
    """The completion that this thread is at; None outside of any."""
    return _current.get()


@contextmanager
def completing(completion: JobCompletion) -> Iterator[JobCompletion]:
    """Makes this thread work at a completion within the block."""
    token = _current.set(completion)
    try:
        yield completion
    finally:
        _current.reset(token)
