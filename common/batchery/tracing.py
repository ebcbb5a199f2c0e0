"""What traces of OpenTelemetry need to know of jobs and batches.

`batchery.otel` switches it on. Nothing here imports OpenTelemetry, so that clients and workers can
ask, whether it is installed or not.
"""

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TracedJob:
    """A job of a batch."""

    #: The headers of its message.
    headers: Mapping[str, Any]
    #: The context in which its listeners were called: one of them may have begun a span there.
    context: contextvars.Context | None = None


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """A batch that has come back from its device, or whose device has died."""

    task: str
    jobs: Sequence[TracedJob]
    #: How long the device had it, in seconds.
    duration_s: float
    #: Facts of the batch; empty if its device has died.
    info: Mapping[str, Any] = field(default_factory=dict)
    #: How its device died; empty if it did not.
    error: str = ""


#: What `batchery.otel` does; None if nothing makes traces. It has three methods: `headers()`, which
#: carry the current trace to a worker; `batch(TracedBatch)`, which makes its span; and
#: `is_receiver(receiver)`, whether a receiver of `before_task_publish` adds these headers.
_tracing: Any = None


def switch(tracing: Any) -> None:
    """Switches traces on, or off with None; for the whole process."""
    global _tracing
    _tracing = tracing


def current_tracing() -> Any:
    """What makes traces; None if nothing does."""
    return _tracing


def trace_headers() -> dict[str, str]:
    """The headers that carry the current trace to a worker; empty without one."""
    found: dict[str, str] = {} if _tracing is None else _tracing.headers()
    return found
