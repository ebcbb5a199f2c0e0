"""Traces of OpenTelemetry: from the caller of a job to the worker that runs it.

    from batchery import otel

    otel.instrument()

Each message carries the trace of its caller, whether it is sent alone or in bulk.
`opentelemetry-instrumentation-celery` in the worker makes a span of each job.
"""

from typing import Any

from celery import current_task, signals
from opentelemetry import propagate

from batchery import tracing
from batchery.tracing import Tracing


def instrument() -> None:
    """Switches traces on, in this process; in the app's module it reaches clients and workers."""
    tracing.switch(Tracing(_headers_of_caller, _before_publish))
    signals.before_task_publish.connect(_before_publish, weak=False)


def uninstrument() -> None:
    """Switches traces off."""
    signals.before_task_publish.disconnect(_before_publish)
    tracing.switch(None)


def _before_publish(headers: Any = None, **_: Any) -> None:
    # A client that sends later than it was called has noted the trace of the call.
    if isinstance(headers, dict) and "traceparent" not in headers:
        headers.update(_headers_of_caller() or _headers_of_current_job())


def _headers_of_caller() -> dict[str, str]:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def _headers_of_current_job() -> dict[str, str]:
    """The trace of the job that publishes a retry, a callback or the next step of a chain."""
    if not current_task:
        return {}
    request: Any = current_task.request
    found = {name: getattr(request, name, None) for name in propagate.get_global_textmap().fields}
    return {name: value for name, value in found.items() if isinstance(value, str)}
