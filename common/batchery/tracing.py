"""What traces of OpenTelemetry need to know of jobs and batches.

`batchery.otel` switches it on. Nothing here imports OpenTelemetry, so that clients and workers can
ask, whether it is installed or not.
"""

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job of a batch."""

    #: The headers of its message.
    headers: Mapping[str, Any]
    #: The context in which its listeners were called: one of them may have begun a span there.
    context: contextvars.Context | None = None


class Tracing(Protocol):
    """What `batchery.otel` does."""

    def headers(self) -> dict[str, str]:
        """The headers that carry the current trace to a worker; empty without one."""

    def batch(
        self, task: str, jobs: Sequence[TracedJob], duration_s: float, info: Mapping[str, Any]
    ) -> None:
        """Makes the span of a batch that was answered.

        Args:
            task: Name of the task.
            jobs: Those of the batch.
            duration_s: How long the device had it, in seconds.
            info: Facts of the batch, as they are stored with each result.
        """

    def is_receiver(self, receiver: Any) -> bool:
        """Whether a receiver of `before_task_publish` is the one that adds `headers`."""


_tracing: Tracing | None = None


def switch(tracing: Tracing | None) -> None:
    """Switches traces on, or off with None; for the whole process."""
    global _tracing
    _tracing = tracing


def current_tracing() -> Tracing | None:
    """What makes traces; None if nothing does."""
    return _tracing


def trace_headers() -> dict[str, str]:
    """The headers that carry the current trace to a worker; empty without one."""
    return {} if _tracing is None else _tracing.headers()
