"""Traces of OpenTelemetry: from the caller of a job to the batch that its item was in.

    from batchery import otel

    otel.instrument()

Each message carries the trace of its caller, whether it is sent alone or in bulk. In the worker
each batch is a span. It is linked to the spans of its jobs, as a batch has many parents.
`opentelemetry-instrumentation-celery` may be used beside it, and makes a span of each job.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery import current_task, signals
from opentelemetry import propagate, trace
from opentelemetry.trace import Link, SpanContext, SpanKind

from batchery import tracing
from batchery.tracing import TracedJob

#: Facts of a batch -> attributes of its span.
FACTS = {
    "id": "batchery.batch.id",
    "size": "batchery.batch.items",
    "padding": "batchery.batch.padding",
    "prepare_ms": "batchery.prepare_ms",
    "queued_ms": "batchery.queued_ms",
    "forward_ms": "batchery.forward_ms",
    "device": "batchery.device",
    "version": "batchery.model.version",
}


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Switches traces on, in this process; in the app's module it reaches clients and workers.

    Args:
        tracer_provider: Gets the spans of batches; by default OpenTelemetry's global one.
    """
    tracing.switch(_OpenTelemetry(tracer_provider))
    signals.before_task_publish.connect(_before_publish, weak=False)


def uninstrument() -> None:
    """Switches traces off."""
    signals.before_task_publish.disconnect(_before_publish)
    tracing.switch(None)


def _before_publish(headers: Any = None, **_: Any) -> None:
    # A client that sends later than it was called has noted the trace of the call.
    if isinstance(headers, dict) and "traceparent" not in headers:
        headers.update(tracing.trace_headers() or _headers_of_current_job())


def _headers_of_current_job() -> dict[str, str]:
    """The trace of the job that publishes a retry, a callback or the next step of a chain."""
    if not current_task:
        return {}
    request: Any = current_task.request
    found = {name: getattr(request, name, None) for name in propagate.get_global_textmap().fields}
    return {name: value for name, value in found.items() if isinstance(value, str)}


class _OpenTelemetry:
    """Makes traces; see `tracing`."""

    def __init__(self, provider: trace.TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("batchery", tracer_provider=provider)

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier

    def is_receiver(self, receiver: Any) -> bool:
        return receiver is _before_publish

    def batch(
        self, task: str, jobs: Sequence[TracedJob], duration_s: float, info: Mapping[str, Any]
    ) -> None:
        ended_ns = time.time_ns()
        delivery = jobs[0].headers.get("delivery_info") or {}
        span = self._tracer.start_span(
            f"process {task}",
            kind=SpanKind.CONSUMER,
            start_time=ended_ns - int(duration_s * 1e9),
            links=[Link(each) for each in map(_find_span, jobs) if each.is_valid],
            attributes={
                "messaging.system": "celery",
                "messaging.operation.type": "process",
                "messaging.operation.name": "process",
                "messaging.destination.name": str(delivery.get("routing_key") or ""),
                "messaging.batch.message_count": len(jobs),
                "batchery.task": task,
                **{FACTS[name]: value for name, value in info.items() if name in FACTS},
            },
        )
        span.end(ended_ns)


def _find_span(job: TracedJob) -> SpanContext:
    """The span of a job in this process, if there is one; otherwise that of its caller."""
    if job.context is not None:
        own = job.context.run(trace.get_current_span).get_span_context()
        if own.is_valid:
            return own
    carrier = {name: value for name, value in job.headers.items() if isinstance(value, str)}
    return trace.get_current_span(propagate.extract(carrier)).get_span_context()
