"""Routes for text classification: texts in, labels out, at once or batch by batch."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, StringConstraints
from starlette.responses import Response, StreamingResponse

from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.event_stream import EventStream, Format, format_for
from batchery_producer.gateway.inference import check_all
from batchery_producer.gateway.models.served_models import ServedModel
from batchery_producer.gateway.monitoring.device_figures import DeviceFigures, in_gb, read_figures
from batchery_producer.gateway.problems import build_problem
from batchery_producer.gateway.routes.fields import WHOLE
from batchery_producer.gateway.routes.shared import json_response
from batchery_producer.gateway.routes.text_batches import (
    DIGITS,
    collect_batches,
    cut,
    held_length,
    labelled,
    list_devices,
    per_s,
)

router = APIRouter(tags=["texts in, labels out"], route_class=JsonRoute)

KINDS = ("classification",)

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=10_000)]


class ProcessBatchRequest(RequestBody):
    """Texts to label."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=100)]
    max_length: Annotated[
        int,
        Field(ge=50, le=1024, description="Tokens that are read of each text, at most."),
        WHOLE,
    ] = 512
    batch_size: Annotated[
        int,
        Field(ge=1, le=32, description="Texts in one message; workers join messages."),
        WHOLE,
    ] = 16
    model: Annotated[str | None, Field(description="The first classifier if missing.")] = None


class LabelledText(BaseModel):
    """One text with its label."""

    text: str
    sentiment: Annotated[str, Field(description="The likeliest label.")]
    confidence: float
    token_count: int
    processing_order: Annotated[int, Field(description="Place of the text in the request, from 0.")]
    truncated: Annotated[bool, Field(description="Whether the text lost its end.")] = False


class BatchInfo(BaseModel):
    """How the texts were computed."""

    requested_batch_size: int
    actual_batches_used: Annotated[
        int, Field(description="Forward passes that these texts shared with those of others.")
    ]
    max_length: Annotated[int, Field(description="What held: a model may read fewer.")]
    device: str | None


class PerformanceMetrics(BaseModel):
    """How fast."""

    texts_per_second: float
    gpu_memory_used: Annotated[float | None, Field(description="In GB; null on a CPU.")]
    total_tokens_processed: int


class ProcessBatchResponse(BaseModel):
    """All labels, in the order of the texts."""

    results: list[LabelledText]
    total_texts: int
    processing_time: Annotated[float, Field(description="In seconds.")]
    average_time_per_text: Annotated[float, Field(description="In seconds.")]
    batch_info: BatchInfo
    performance_metrics: PerformanceMetrics


class BatchStatsResponse(BaseModel):
    """What these routes did, in all processes of all gateways, and their devices."""

    total_requests: int
    total_texts_processed: int
    average_batch_time: Annotated[float, Field(description="Of a forward pass, in seconds.")]
    peak_batch_size: int
    device: str | None
    model_loaded: bool
    current_gpu_memory: Annotated[float | None, Field(description="In GB; null on a CPU.")]
    max_gpu_memory: Annotated[float | None, Field(description="In GB; null on a CPU.")]


class BatchEvent(BaseModel):
    """An event of `/process-batch-stream`; which fields it has depends on `status`."""

    status: Literal["started", "processing_batch", "batch_complete", "completed", "error"]
    total_texts: int | None = None
    batch_size: int | None = None
    estimated_batches: int | None = None
    batch_number: Annotated[int | None, Field(description="From 1.")] = None
    progress: Annotated[
        float | None, Field(description="Share of the texts that are done, 0 to 1.")
    ] = None
    batch_time: float | None = None
    texts_per_second: float | None = None
    partial_results: list[LabelledText] | None = None
    total_time: float | None = None
    average_time_per_text: float | None = None
    final_results: list[LabelledText] | None = None
    detail: Annotated[str | None, Field(description="What went wrong; the last event.")] = None
    kind: str | None = None
    retry_after_s: float | None = None


#: Its references lead to the models of the answer of `/process-batch`.
EVENT_SCHEMA = BatchEvent.model_json_schema(ref_template="#/components/schemas/{model}")
EVENT_SCHEMA.pop("$defs")

SSE_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": EVENT_SCHEMA,
        }
    },
}


@router.post("/process-batch", response_model=ProcessBatchResponse)
async def process_batch(request: Request, body: ProcessBatchRequest) -> Response:
    """The label of each text."""
    gateway = request.app.state.gateway
    model = _model_for(request, body)
    began_s = time.perf_counter()
    outcomes = await gateway.inference.outcomes(
        request, model, body.texts, _keywords(model, body), body.batch_size
    )
    check_all(outcomes)
    took_s = time.perf_counter() - began_s
    batches, count = collect_batches(outcomes), len(outcomes)
    results = labelled(body.texts, outcomes, 0)
    await gateway.batch_counters.count(count, batches)
    content = {
        "results": results,
        "total_texts": count,
        "processing_time": round(took_s, DIGITS),
        "average_time_per_text": round(took_s / count, DIGITS),
        "batch_info": {
            "requested_batch_size": body.batch_size,
            "actual_batches_used": len(batches),
            "max_length": held_length(_max_length(model, body), results),
            "device": list_devices(batches),
        },
        "performance_metrics": {
            "texts_per_second": per_s(count, took_s),
            "gpu_memory_used": await _gpu_memory(request, model, batches),
            "total_tokens_processed": sum(result["token_count"] for result in results),
        },
    }
    return json_response(content)


@router.get("/batch-stats")
async def batch_stats(request: Request) -> BatchStatsResponse:
    """What was counted since the beginning, and the devices of the first classifier."""
    gateway = request.app.state.gateway
    gateway.health.check()
    totals = await gateway.batch_counters.totals()
    model = next((model for model in gateway.models if model.kind in KINDS), None)
    devices = (
        DeviceFigures()
        if model is None
        else read_figures(await gateway.monitor.workers(), model.queue)
    )
    return BatchStatsResponse(
        total_requests=totals.requests,
        total_texts_processed=totals.texts,
        average_batch_time=round(totals.forward_s / max(totals.batches, 1), DIGITS),
        peak_batch_size=totals.peak_batch_size,
        device=", ".join(devices.names) or None,
        model_loaded=bool(devices.names),
        current_gpu_memory=in_gb(devices.allocated_bytes),
        max_gpu_memory=in_gb(devices.peak_bytes),
    )


@router.post(
    "/process-batch-stream",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "An event for each step.",
            "content": {
                "text/event-stream": {"itemSchema": SSE_SCHEMA},
                "application/x-ndjson": {"itemSchema": EVENT_SCHEMA},
            },
        }
    },
)
async def process_batch_stream(
    request: Request,
    body: ProcessBatchRequest,
    format_: Annotated[
        Format | None, Query(alias="format", description="By default what `Accept` asks for.")
    ] = None,
) -> Response:
    """The labels batch by batch, as server-sent events or as lines of JSON."""
    run = _Run(request, _model_for(request, body), body)
    accept = request.headers.get("accept", "")
    return EventStream(run.events(), format_for(accept, format_), run.stop)


@dataclass(slots=True)
class _Batch:
    """A batch on its way."""

    texts: Sequence[str]
    start: int
    outcomes: "asyncio.Future[list[Outcome]]"


class _Run:
    """A stream: all batches are sent at once, and told of in order."""

    def __init__(self, request: Request, model: ServedModel, body: ProcessBatchRequest) -> None:
        self._gateway = request.app.state.gateway
        self._wanted = body
        run = self._gateway.inference.run
        self._began_s = time.perf_counter()
        self._batches = [
            _Batch(
                texts,
                number * body.batch_size,
                asyncio.ensure_future(
                    run(request, model, texts, _keywords(model, body), len(texts))
                ),
            )
            for number, texts in enumerate(cut(body.texts, body.batch_size))
        ]
        # Also looks at the errors that nobody awaits after the first.
        self._all = asyncio.gather(
            *(batch.outcomes for batch in self._batches), return_exceptions=True
        )

    def stop(self) -> None:
        """Revokes what has not ended."""
        # Not `_all`, which would hold an error that nobody asks for.
        for batch in self._batches:
            batch.outcomes.cancel()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events, until the first error."""
        total = len(self._wanted.texts)
        yield {
            "status": "started",
            "total_texts": total,
            "batch_size": self._wanted.batch_size,
            "estimated_batches": len(self._batches),
        }
        results: list[dict[str, Any]] = []
        outcomes: list[Outcome] = []
        for number, batch in enumerate(self._batches, 1):
            yield {
                "status": "processing_batch",
                "batch_number": number,
                "batch_size": len(batch.texts),
                "progress": round(batch.start / total, DIGITS),
            }
            began_s = time.perf_counter()
            try:
                ended = await batch.outcomes
                check_all(ended)
            except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
                yield _error_event(number, error)
                return
            took_s = time.perf_counter() - began_s
            partial = labelled(batch.texts, ended, batch.start)
            results += partial
            outcomes += ended
            yield {
                "status": "batch_complete",
                "batch_number": number,
                "batch_time": round(took_s, DIGITS),
                "texts_per_second": per_s(len(partial), took_s),
                "partial_results": partial,
            }
        # Before the last event, after which callers hang up.
        await self._gateway.batch_counters.count(total, collect_batches(outcomes))
        total_s = time.perf_counter() - self._began_s
        yield {
            "status": "completed",
            "total_time": round(total_s, DIGITS),
            "average_time_per_text": round(total_s / total, DIGITS),
            "final_results": results,
        }


def _error_event(number: int, error: Exception) -> dict[str, Any]:
    problem = build_problem(error)
    retry = {} if problem.retry_after_s is None else {"retry_after_s": problem.retry_after_s}
    return {
        "status": "error",
        "batch_number": number,
        "detail": problem.message,
        "kind": problem.kind,
        **retry,
    }


def _model_for(request: Request, body: ProcessBatchRequest) -> ServedModel:
    """The model of a request that may pass.

    Raises:
        Problem: There is no such model, too much text, no worker, or no Redis.
    """
    gateway = request.app.state.gateway
    model: ServedModel = gateway.models.find(body.model, KINDS)
    request.state.caller.check(len(body.texts), sum(map(len, body.texts)))
    gateway.health.check()
    gateway.inference.check_worker(model)
    return model


def _max_length(model: ServedModel, body: ProcessBatchRequest) -> int:
    return min(body.max_length, model.settings.max_length or body.max_length)


def _keywords(model: ServedModel, body: ProcessBatchRequest) -> dict[str, Any]:
    limit = _max_length(model, body)
    # Jobs with other keywords share no batches, so none is sent without need.
    return {} if limit == model.settings.max_length else {"max_length": limit}


async def _gpu_memory(
    request: Request, model: ServedModel, batches: set[BatchSummary]
) -> float | None:
    if all(batch.device.startswith("cpu") for batch in batches):
        return None
    devices = read_figures(await request.app.state.gateway.monitor.workers(), model.queue)
    return in_gb(devices.allocated_bytes)
