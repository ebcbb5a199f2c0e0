"""What clients need to know of traces of OpenTelemetry.

`batchery.otel` switches it on. Nothing here imports OpenTelemetry, so that clients can ask, whether
it is installed or not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Tracing(NamedTuple):
    """What `batchery.otel` does."""

    #: Makes the headers that carry the current trace to a worker; empty without one.
    make_headers: Callable[[], dict[str, str]]
    #: The receiver of `before_task_publish` that adds them.
    receiver: Callable[..., None]


_tracing: Tracing | None = None


def switch(tracing: Tracing | None) -> None:
    """Switches traces on, or off with None; for the whole process."""
    global _tracing
    _tracing = tracing


def is_receiver(receiver: Any) -> bool:
    """Whether a receiver of `before_task_publish` is the one that adds `trace_headers`."""
    return _tracing is not None and receiver is _tracing.receiver


def trace_headers() -> dict[str, str]:
    """The headers that carry the current trace to a worker; empty without one."""
    return {} if _tracing is None else _tracing.make_headers()
