"""An app whose jobs carry traces of OpenTelemetry, and whose worker makes spans of them."""

import json
import os
from collections.abc import Sequence
from typing import Any

from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from redis import Redis

from batchery import BatchTask, Failed, install, otel

URL = os.environ.get("CELERY_RESULT_BACKEND", "redis://127.0.0.1:1/0")

#: A Redis list: the spans of the worker, one JSON object each.
SPANS = "traced:spans"

app = install(Celery("traced", broker=URL, backend=URL, set_as_current=False))
app.conf.worker_hijack_root_logger = False


class ToRedis(SpanExporter):
    """Writes spans down."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Redis.from_url(URL) as redis:
            for span in spans:
                redis.rpush(SPANS, json.dumps(plain(span)))
        return SpanExportResult.SUCCESS


def plain(span: ReadableSpan) -> dict[str, Any]:
    """What a test looks at."""
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "parent": span.parent.span_id if span.parent else None,
    }


if "TRACED_WORKER" in os.environ:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToRedis()))
    trace.set_tracer_provider(provider)
    otel.instrument()
    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]


@app.task(shared=False, base=BatchTask, name="traced.shout", max_batch_size=64)
def shout(words: list[str]) -> list[Any]:
    return [Failed("asked to") if word == "fail" else word.upper() for word in words]
